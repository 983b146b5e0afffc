"""Train five batches of each ZeRO stage and precision in the same process.

fp16 in stage 0 is left out: DeepSpeed 0.19 does not scale its losses.
"""

import itertools

from deepspeed.accelerator import get_accelerator
from text_runs import LossTrial, config, keep_group, print_facts, train


class ScaleTrial(LossTrial):
    """Appends the loss scale to ``scales`` after every batch."""

    def __init__(self, context):
        super().__init__(context)
        self.scales = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.scales.append(loss_scale(self.engine.optimizer))
        return found


def loss_scale(optimizer):
    for owner, name in (
        (getattr(optimizer, "loss_scaler", None), "cur_scale"),
        (optimizer, "cur_scale"),
        (optimizer, "loss_scale"),
    ):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return 1.0


keep_group()
supported = {str(dtype) for dtype in get_accelerator().supported_dtypes()}
names = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
rows = []
for precision, stage in itertools.product(names, range(4)):
    if names[precision] not in supported or (precision, stage) == ("fp16", 0):
        continue
    print(f"{precision} with ZeRO {stage}", flush=True)
    trial, _ = train({"deepspeed_config": config(stage, precision)}, 5, ScaleTrial)
    losses = [float(loss) for loss in trial.losses]
    rows.append([precision, stage, losses, trial.scales, int(trial.engine.skipped_steps)])
print_facts(rows=rows)
