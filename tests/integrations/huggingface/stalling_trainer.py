"""A small Trainer on two ranks: ``stalling_trainer.py silent|slow``.

``silent``: the data loader of rank 1 blocks after four steps. ``slow``: callbacks and metrics sleep between steps.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from dstrial.integrations import huggingface

STALL_AFTER = 4
MICRO = 2
FOREVER_S = 600
SLOW_S = 5.0


class Records(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Records whose reading blocks after ``silent_after`` reads; -1 for never."""

    def __init__(self, count: int, silent_after: int = -1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 64, (count, 16), generator=generator)
        self.left = silent_after

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        if self.left == 0:
            self.read_from_storage()
        self.left -= 1
        return {"input_ids": self.tokens[idx], "labels": self.tokens[idx]}

    def read_from_storage(self) -> None:
        time.sleep(FOREVER_S)


class Slow(TrainerCallback):  # type: ignore[misc]
    """Sleeps at the second save, the second evaluation and the end of training."""

    def __init__(self) -> None:
        self.num_saves = 0
        self.num_evaluations = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_saves += 1
        if self.num_saves == 2:
            time.sleep(SLOW_S)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_evaluations += 1
        if self.num_evaluations == 2:
            time.sleep(SLOW_S)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Runs after DetCallback, which does not see this request at the end of the step.
        control.should_evaluate |= state.global_step == 3

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(SLOW_S)


def slow_metrics(_predictions: Any) -> dict[str, float]:
    time.sleep(SLOW_S / 2)
    return {}


def main(attack: str) -> None:
    # The loader prefetches one micro batch.
    silent_after = MICRO * (STALL_AFTER + 1) if attack == "silent" else -1
    rank = int(os.environ["RANK"])
    is_slow = attack == "slow"
    between = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}
    with huggingface.init() as core_context:
        args = TrainingArguments(
            "output",
            max_steps=16,
            per_device_train_batch_size=MICRO,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            deepspeed="ds_config.json",
            **(between if is_slow else {"save_strategy": "no"}),
        )
        callback = huggingface.DetCallback(core_context, args)
        sizes = {"vocab_size": 64, "n_positions": 16, "n_layer": 1, "n_head": 2, "n_embd": 32}
        trainer = Trainer(
            GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
            args,
            train_dataset=Records(80, silent_after if rank == 1 else -1),
            eval_dataset=Records(8) if is_slow else None,
            compute_metrics=slow_metrics if is_slow else None,
            callbacks=[callback, Slow()] if is_slow else [callback],
        )
        if attack == "silent":
            huggingface.train(trainer, callback)
        else:
            trainer.train()
    print(f"rank {rank} is at step {trainer.state.global_step}")


if __name__ == "__main__":
    main(sys.argv[1])
