"""Train with checkpoints behind the loop, and compare with DeepSpeed's own saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dstrial
from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train

_PERIOD, _NUM_SAVES = 5, 4


class SaveTimes(TextTrial):
    """Saves with DeepSpeed after the same steps as dstrial, and times everything else.

    Attributes:
        cycles_s: by batch: from the end of the last one, when its device was done, to the end of this one. A save of dstrial's
            is in that of the batch that follows it, also where the device copies before it goes on.
        gaps_s: by batch: from the end of the last one to the beginning of this one, the loop's own share of it.
        bare_s: of each ``engine.save_checkpoint``.
    """

    bare = Path()

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.ended_s = 0.0
        self.cycles_s: dict[int, float] = {}
        self.gaps_s: dict[int, float] = {}
        self.bare_s: list[float] = []

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one batch; every few, save what it has made of the engine."""
        if self.ended_s:
            self.gaps_s[batch_idx] = time.perf_counter() - self.ended_s
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self._synchronise()
        if self.ended_s:
            self.cycles_s[batch_idx] = time.perf_counter() - self.ended_s
        if (batch_idx + 1) % _PERIOD == 0:
            began_s = time.perf_counter()
            self.engine.save_checkpoint(str(self.bare), tag=f"batch-{batch_idx + 1}")
            self.bare_s.append(time.perf_counter() - began_s)
        self.ended_s = time.perf_counter()
        return found

    def _synchronise(self) -> None:
        if self.context.device.type != "cpu":
            torch.accelerator.synchronize()


def main() -> None:
    """Train, then compare the last checkpoints."""
    program = Program("width", "scratch")
    width = int(program.arguments.width)
    SaveTimes.bare = Path(program.arguments.scratch) / "bare"
    hparams = {
        "deepspeed_config": deepspeed_config(1),
        "shape": {"width": width, "num_layers": 4, "num_heads": 8, "block_size": 32},
    }
    program.note(doing="training with checkpoints")
    # Two batches follow the last checkpoint while it is written.
    trial, run_dir = train(
        hparams,
        _PERIOD * _NUM_SAVES + 2,
        trial_class=SaveTimes,
        checkpoint_period=dstrial.Batch(_PERIOD),
        reporting_period=dstrial.Batch(1_000_000),
    )
    ordinary_s = statistics.median(one for idx, one in trial.cycles_s.items() if idx % _PERIOD)
    held_s = [one - ordinary_s for idx, one in sorted(trial.cycles_s.items()) if idx % _PERIOD == 0]
    stall_s, bare_s = statistics.median(held_s[1:]), statistics.median(trial.bare_s[1:])
    program.note(
        doing="comparing files",
        batch_s=ordinary_s,
        stall_s=stall_s,
        loop_held_s=statistics.median(
            [gap for idx, gap in sorted(trial.gaps_s.items()) if idx % _PERIOD == 0][1:]
        ),
        first_stall_s=held_s[0],
        bare_s=bare_s,
        first_bare_s=trial.bare_s[0],
        stall_ratio=max(stall_s, 0.0) / bare_s,
        parameters=sum(one.numel() for one in trial.model.parameters()),
    )
    num_values, num_bytes, different = 0, 0, []
    for mark in sorted(run_dir.glob("checkpoints/*/COMPLETE")):
        steps = _steps(mark)
        theirs = SaveTimes.bare / f"batch-{steps}"
        if steps is None or not theirs.is_dir():
            continue
        for path in sorted(theirs.rglob("*.pt")):
            (own,) = mark.parent.rglob(path.name)
            num_bytes += path.stat().st_size
            values, found = dict(_leaves(_load(path), "")), dict(_leaves(_load(own), ""))
            num_values += len(values)
            different += [
                f"batch {steps}: {path.name}{name}"
                for name in values
                if not _equal(values[name], found.get(name))
            ]
    if not num_values:
        different.append("no checkpoint of the same batch was found")
    program.note(doing="", num_values=num_values, megabytes=num_bytes / 1e6, different=different)


def _steps(mark: Path) -> int | None:
    from dstrial.local.json_files import read_json

    found = read_json(mark)
    return int(found["steps_completed"]) if isinstance(found, dict) and "steps_completed" in found else None


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for idx, one in enumerate(value):
            yield from _leaves(one, f"{name}/{idx}")
    elif isinstance(value, (torch.Tensor, int, float, str, bool, type(None))):
        yield name, value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(
            torch.equal(
                left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8)
            )
        )
    return bool(left == right)


if __name__ == "__main__":
    main()
