"""Train on the device with CUDA's synchronisation check on wherever the loop, not the user's step, is running."""

import sys

import torch
from small_runs import DEFINITIONS, deepspeed_config

sys.path.insert(0, str(DEFINITIONS))

import small_trials

from dstrial import Batch, Trainer, init

EXP_CONF = {"name": "sync", "reproducibility": {"experiment_seed": 3}}


class Checked(small_trials.DataParallelTrial):
    """Switches the check off inside its own steps, and on between them while no report is due."""

    report_every = 50
    checked = 0

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        torch.cuda.set_sync_debug_mode("default")
        features, targets = self.context.to_device(next(dataloader_iter))
        loss = torch.nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        self.model_engine.step()
        if 5 <= batch_idx % self.report_every < 45:
            Checked.checked += 1
            torch.cuda.set_sync_debug_mode("error")
        return {"loss": loss}


config = deepspeed_config(0, gradient_accumulation_steps=1)
config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
with init(hparams={"deepspeed_config": config, "num_records": 4096}, exp_conf=EXP_CONF) as context:
    assert context.device.type == "cuda", context.device
    Trainer(Checked(context), context).fit(max_length=Batch(50), reporting_period=Batch(50))
torch.cuda.set_sync_debug_mode("default")
print(f"{Checked.checked} batches without a synchronisation")
