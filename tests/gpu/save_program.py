"""Compare background checkpoints with ``engine.save_checkpoint``.

Reports how long a background save delays the next batch, and whether its files are bitwise equal to those of the synchronous
save although training continues and changes the weights.
"""

import pathlib
import statistics
import sys
import time

import torch
from text_runs import LossTrial, config, print_facts, train

import dstrial
from dstrial.local.json_files import read_json

PERIOD, NUM_SAVES = 5, 4
BARE = pathlib.Path("bare").absolute()


class SaveTimes(LossTrial):
    """Saves by DeepSpeed at every dstrial save, and measures batch and save times."""

    def __init__(self, context):
        super().__init__(context)
        self.ended_s = 0.0
        self.cycles_s = {}  # batch -> time since the end of the previous batch
        self.bare_s = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if self.context.device.type != "cpu":
            torch.accelerator.synchronize()
        if self.ended_s:
            self.cycles_s[batch_idx] = time.perf_counter() - self.ended_s
        if (batch_idx + 1) % PERIOD == 0:
            began_s = time.perf_counter()
            self.engine.save_checkpoint(str(BARE), tag=f"batch-{batch_idx + 1}")
            self.bare_s.append(time.perf_counter() - began_s)
        self.ended_s = time.perf_counter()
        return found


def leaves(value, name=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for idx, one in enumerate(value):
            yield from leaves(one, f"{name}/{idx}")
    elif isinstance(value, torch.Tensor):
        yield (
            name,
            (value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).numpy().tobytes()),
        )
    elif isinstance(value, (int, float, str, bool, type(None))):
        yield name, value


def values_of(path):
    return dict(leaves(torch.load(path, map_location="cpu", weights_only=False)))


hparams = {
    "deepspeed_config": config(1),
    "shape": {"width": int(sys.argv[1]), "num_layers": 4, "num_heads": 8, "block_size": 32},
}
# Two batches follow the last checkpoint while it is written.
trial, run_dir = train(
    hparams,
    PERIOD * NUM_SAVES + 2,
    SaveTimes,
    checkpoint_period=dstrial.Batch(PERIOD),
    reporting_period=dstrial.Batch(1_000_000),
)
ordinary_s = statistics.median(one for idx, one in trial.cycles_s.items() if idx % PERIOD)
held_s = [one - ordinary_s for idx, one in sorted(trial.cycles_s.items()) if idx % PERIOD == 0]
num_values, different = 0, []
for mark in sorted(run_dir.glob("checkpoints/*/COMPLETE")):
    bare = BARE / f"batch-{read_json(mark)['steps_completed']}"
    for path in sorted(bare.rglob("*.pt")):
        (own,) = mark.parent.rglob(path.name)
        expected, found = values_of(path), values_of(own)
        num_values += len(expected)
        different += [f"{path}{name}" for name in expected if found.get(name) != expected[name]]
print_facts(
    num_values=num_values,
    different=different,
    stall_ratio=max(statistics.median(held_s[1:]), 0.0) / statistics.median(trial.bare_s[1:]),
)
