"""Compare the reports of 12 batches, uninterrupted and resumed after batch 8."""

import ast
import json
import sys

from small_runs import DEFINITIONS, TIMINGS, deepspeed_config

sys.path.insert(0, str(DEFINITIONS))

import small_trials

from dstrial import Batch, Trainer, init

# name -> (ZeRO stage, sections of the DeepSpeed config)
CONFIGURATIONS = ast.literal_eval(sys.argv[1])
EXP_CONF = {"name": "resume", "reproducibility": {"experiment_seed": 3}}


class Trial(small_trials.DataParallelTrial):
    """Computes its loss in the model's dtype."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = self.batch(dataloader_iter)
        loss = ((self.model_engine(features) - targets) ** 2).mean()
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = self.batch(dataloader_iter)
        return {"validation_loss": ((self.model_engine(features) - targets) ** 2).mean()}

    def batch(self, dataloader_iter):
        dtype = next(self.model_engine.module.parameters()).dtype
        return [tensor.to(dtype) for tensor in self.context.to_device(next(dataloader_iter))]


def train(stage, sections, stop_after, run_dir=None):
    config = deepspeed_config(stage, **sections)
    with init(hparams={"deepspeed_config": config}, exp_conf=EXP_CONF, run_dir=run_dir) as context:
        trial = Trial(context)
        Trainer(trial, context).fit(
            max_length=Batch(stop_after),
            reporting_period=Batch(4),
            latest_checkpoint="latest" if run_dir else None,
            checkpoint_policy="none",
        )
        directory = context._core.run_directory
    rows = [json.loads(line) for line in directory.metrics_path.read_text().splitlines()]
    values = {
        row["steps_completed"]: {k: v for k, v in row["metrics"].items() if k not in TIMINGS}
        for row in rows
        if row["group"] == "training"
    }
    return directory.path, values


for name, (stage, sections) in CONFIGURATIONS.items():
    _, whole = train(stage, sections, 12)
    first, _ = train(stage, sections, 8)
    _, resumed = train(stage, sections, 12, first)
    assert resumed == whole, (name, resumed, whole)
    print(f"{name}: resumed reports are equal", flush=True)
