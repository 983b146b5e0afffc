"""Measure what ``DetCallback`` adds to a Trainer's step, against the same Trainer without it.

``python benchmarks/hf_callback.py [--steps N] [--rounds N]``; with two ranks:
``python -m dstrial.launch --slots 2 benchmarks/hf_callback.py``. Each round trains the same small model twice, without and
with the callback, in turn, and takes the median step of each; the table gives the median of the rounds. Neither logs nor saves
within the measured steps: what a report or a checkpoint costs is its own, and not a step's. The callback's own time is also
taken directly, as the time inside its four events of a step, which does not suffer from the noise of the steps around it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
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


class StepTimes(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the time."""
        self.ended_s.append(time.perf_counter())

    def median_s(self) -> float:
        """Return the median length of a step, without the first ten."""
        return statistics.median(b - a for a, b in zip(self.ended_s[10:], self.ended_s[11:], strict=False))


class Timed:
    """Takes the time inside the callback's events of a step."""

    def __init__(self, callback: huggingface.DetCallback) -> None:
        self.spent_s: list[float] = []
        for name in _EVENTS:
            setattr(callback, name, self._timed(getattr(callback, name), begins=name == _EVENTS[0]))

    def _timed(self, event: Any, *, begins: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = event(*args, **kwargs)
            spent_s = time.perf_counter() - began_s
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


def train(directory: Path, steps: int, core_context: Any) -> tuple[float, list[float]]:
    """Train once; return the median step and the time inside the callback by step, both in seconds."""
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
    times = StepTimes()
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Records(), callbacks=[times])
    if core_context is None:
        trainer.train()
        return times.median_s(), []
    callback = huggingface.DetCallback(core_context, args)
    timed = Timed(callback)
    huggingface.train(trainer, callback)
    return times.median_s(), timed.spent_s


def main() -> None:
    """Measure and print a Markdown table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dstrial-hf-") as made:
        os.environ.setdefault("DSTRIAL_RUNS_DIR", made)
        with huggingface.init() as core_context:
            bare, reported, spent = [], [], []
            shared = Path(core_context.distributed.broadcast(made))
            for idx in range(options.rounds):
                directory = shared / str(idx)
                bare.append(train(directory, options.steps, None)[0])
                step_s, inside_s = train(directory, options.steps, core_context)
                reported.append(step_s)
                spent += inside_s[10:]
            if core_context.distributed.rank == 0:
                _print(core_context.distributed.size, bare, reported, spent)


def _print(num_ranks: int, bare: list[float], reported: list[float], spent: list[float]) -> None:
    without_s, with_s = statistics.median(bare), statistics.median(reported)
    mean_s = statistics.fmean(spent)
    print(
        "| ranks | step without | step with | inside the callback: median, mean, largest | mean share of a 20 ms step |"
    )
    print("|---|---|---|---|---|")
    print(
        f"| {num_ranks} | {without_s * 1e3:.3f} ms | {with_s * 1e3:.3f} ms | {statistics.median(spent) * 1e6:.1f} us, "
        f"{mean_s * 1e6:.1f} us, {max(spent) * 1e6:.0f} us | {mean_s / STEP_S:.2%} (aim: under {AIM:.0%}) |"
    )


if __name__ == "__main__":
    main()
