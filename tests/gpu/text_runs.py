"""Train the GPT of ``dstrial doctor`` in the current process."""

import json
import os
from pathlib import Path

import dstrial
from dstrial.doctor.proof_trial import TextTrial
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.identity import identify
from dstrial.trial.context import runtime_of


class LossTrial(TextTrial):
    """Keeps the losses of all micro batches as device tensors."""

    def __init__(self, context):
        super().__init__(context)
        self.losses = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.losses.append(found["loss"].detach())
        return found


def keep_group():
    """Create one process group for all runs; a second would find stale store keys."""
    process_group.init_process_group(identify(os.environ), timeout_s=timeout_from_environ())
    process_group.keep()


def config(stage, precision="fp32", **sections):
    """Return a DeepSpeed config; fp16 starts with loss scale 2**32, which overflows."""
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }
    if precision == "bf16":
        found["bf16"] = {"enabled": True}
    if precision == "fp16":
        found["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1}
    return {**found, **sections}


def train(hparams, num_batches, trial_class=LossTrial, **fit):
    """Train ``num_batches`` batches; return the trial and the run directory."""
    exp_conf = {"name": "gpu", "reproducibility": {"experiment_seed": 3}}
    with dstrial.init(hparams=hparams, exp_conf=exp_conf, enable_tensorboard_logging=False) as context:
        trial = trial_class(context)
        settings = {"reporting_period": dstrial.Batch(num_batches), "checkpoint_policy": "none", **fit}
        dstrial.Trainer(trial, context).fit(max_length=dstrial.Batch(num_batches), **settings)
        return trial, Path(runtime_of(context).core.run_directory.path)


def print_facts(**facts):
    """Print facts on rank 0 in the form that ``programs.facts`` reads."""
    if os.environ.get("RANK", "0") == "0":
        print(f"facts: {json.dumps(facts)}", flush=True)
