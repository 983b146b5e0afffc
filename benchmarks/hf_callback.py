"""Measure what ``DetCallback`` adds to a Trainer's step, against the same Trainer without it.

``python benchmarks/hf_callback.py [--steps N] [--rounds N]``; with two ranks:
``python -m dstrial.launch --slots 2 benchmarks/hf_callback.py``. Each round trains the same small model twice, once without and
once with the callback, first one and then the other in turn, so that whatever else the machine does meets both alike. Nothing
is logged or saved within the measured steps: what a report or a checkpoint costs is its own, and not a step's.

Of each step the wall time and the time on a processor are taken, of this process with all its threads; the table gives the
median over the rounds of each round's median step, and of the difference between the two halves of a round, each with the
interval that holds the true median with 95 %. The callback's own part is also taken directly: the main thread's processor
time inside its two events of a step, with the mean and the interval of its mean over the rounds. That says least of the
machine, and is what the aim is for. The last column is what its threads take of a processor while nothing else is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from dstrial.integrations import huggingface

STEP_S = 0.020
AIM = 0.01
"""The most that the callback should add to a step of 20 ms, as a share of it."""

_EVENTS = ("on_step_begin", "on_step_end")
_NUM_WARM_UP = 10
_IDLE_S = 2.0


class Steps(TrainerCallback):
    """Notes when each step ended, by the wall and by the processor; idles at the end if asked to.

    Args:
        idles: whether to measure, after the last step, what the process takes of a processor while nothing is done.
    """

    def __init__(self, *, idles: bool) -> None:
        self._idles = idles
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []
        self.idle_share = math.nan

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the times."""
        self.wall_s.append(time.perf_counter())
        self.processor_s.append(time.process_time())
        if self._idles and state.global_step == state.max_steps:
            began_s = time.process_time()
            time.sleep(_IDLE_S)
            self.idle_share = (time.process_time() - began_s) / _IDLE_S


class Timed:
    """Takes the time inside the callback's events of a step, by a clock."""

    def __init__(self, callback: huggingface.DetCallback, clock: Callable[[], float]) -> None:
        self.spent_s: list[float] = []
        self._clock = clock
        for name in _EVENTS:
            setattr(callback, name, self._timed(getattr(callback, name), begins=name == _EVENTS[0]))

    def _timed(self, event: Any, *, begins: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = self._clock()
            result = event(*args, **kwargs)
            spent_s = self._clock() - began_s
            if begins:
                self.spent_s.append(spent_s)
            elif self.spent_s:
                self.spent_s[-1] += spent_s
            return result

        return run


class Records(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many records of tokens as are asked for."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((16,), idx % 64)
        return {"input_ids": tokens, "labels": tokens}


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """What one training of a round showed.

    Attributes:
        wall_s: median step by the wall.
        processor_s: median step by the processor.
        inside_s: mean time inside the callback by step; 0 without it.
        idle_share: of a processor, by the callback's threads; nan without it.
    """

    wall_s: float
    processor_s: float
    inside_s: float
    idle_share: float


def train(directory: Path, steps: int, core_context: Any, *, idles: bool = False) -> Half:
    """Train once, with the callback if there is a core context."""
    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_layer=2, n_head=2, n_embd=32, bos_token_id=0, eos_token_id=0
    )
    noted = Steps(idles=idles)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Records(), callbacks=[noted])
    inside_s = 0.0
    if core_context is None:
        trainer.train()
    else:
        callback = huggingface.DetCallback(core_context, args)
        timed = Timed(callback, time.thread_time)
        huggingface.train(trainer, callback)
        inside_s = statistics.fmean(timed.spent_s[_NUM_WARM_UP:])
    return Half(_median_step(noted.wall_s), _median_step(noted.processor_s), inside_s, noted.idle_share)


def _median_step(ended_s: Sequence[float]) -> float:
    return statistics.median(
        b - a for a, b in zip(ended_s[_NUM_WARM_UP:], ended_s[_NUM_WARM_UP + 1 :], strict=False)
    )


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return a median and the interval that holds the true one with 95 %, from the ranks of the values (sign test)."""
    ordered, num = sorted(values), len(values)
    outside, total = 0, 0.0
    # As many values on each side as chance leaves outside in at most 2.5 % of all cases.
    while outside < (num - 1) // 2:
        total += math.comb(num, outside) / 2**num
        if total > 0.025:
            break
        outside += 1
    outside = max(outside - 1, 0)
    return statistics.median(ordered), ordered[outside], ordered[num - 1 - outside]


def main() -> None:
    """Measure and print a Markdown table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dstrial-hf-") as made:
        os.environ.setdefault("DSTRIAL_RUNS_DIR", made)
        with huggingface.init() as core_context:
            bare: list[Half] = []
            reported: list[Half] = []
            shared = Path(core_context.distributed.broadcast(made))
            for idx in range(options.rounds):
                is_last = idx == options.rounds - 1
                for is_with in (False, True) if idx % 2 == 0 else (True, False):
                    context = core_context if is_with else None
                    half = train(
                        shared / f"{idx}-{is_with}", options.steps, context, idles=is_last and is_with
                    )
                    (reported if is_with else bare).append(half)
            if core_context.distributed.rank == 0:
                _print(core_context.distributed.size, bare, reported)


def _print(num_ranks: int, bare: Sequence[Half], reported: Sequence[Half]) -> None:
    def told(values: Sequence[float], unit_s: float, digits: int) -> str:
        middle, low, high = (value / unit_s for value in median_interval(values))
        return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"

    inside = [half.inside_s for half in reported]
    mean_s = statistics.fmean(inside)
    margin_s = 1.96 * statistics.stdev(inside) / math.sqrt(len(inside)) if len(inside) > 1 else math.nan
    print(
        "| ranks | | step without, ms | step with, ms | difference, us | inside, mean us | of a 20 ms step | threads |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, field in (("processor", "processor_s"), ("wall", "wall_s")):
        without = [getattr(half, field) for half in bare]
        with_it = [getattr(half, field) for half in reported]
        differences = [b - a for a, b in zip(without, with_it, strict=True)]
        own = f"{mean_s * 1e6:.1f} +- {margin_s * 1e6:.1f} | {mean_s / STEP_S:.2%} (aim: under {AIM:.0%})"
        own += f" | {reported[-1].idle_share:.2%}"
        print(
            f"| {num_ranks} | {name} | {told(without, 1e-3, 3)} | {told(with_it, 1e-3, 3)} | {told(differences, 1e-6, 0)} | "
            f"{own if field == 'processor_s' else '| |'} |"
        )


if __name__ == "__main__":
    main()
