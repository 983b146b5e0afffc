"""What all programs share: arguments, facts, warnings, DeepSpeed config."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from dstrial.doctor.training.check import Facts
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.identity import identify


class Program:
    """A rank's view of its program.

    Args:
        flags: further arguments, ``--name`` each, whose values are strings.

    Attributes:
        arguments: what it was given.
        is_chief: whether this is rank 0.
        is_alone: whether there is no other rank.
    """

    def __init__(self, *flags: str) -> None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        parser = argparse.ArgumentParser()
        parser.add_argument("--facts", type=Path, required=True)
        for flag in flags:
            parser.add_argument(f"--{flag}", default="")
        self.arguments = parser.parse_args()
        self.is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        self.is_chief = os.environ.get("RANK", "0") == "0"
        self._facts = Facts(self.arguments.facts)

    def keep_group(self) -> None:
        """Bring up the process group once for several trainings. Ranks: all.

        A group that is ended and begun again meets the keys of the first in torchrun's store, and hangs.
        """
        identity = identify(os.environ)
        process_group.init_process_group(identity, timeout_s=timeout_from_environ())
        process_group.keep()

    def may_go_on_after(self, error: Exception) -> bool:
        """Say whether this rank may try the next config: only if no other rank waits."""
        if self.is_alone:
            traceback.print_exception(error)
        return self.is_alone

    def note(self, **values: Any) -> None:
        """Keep what was found, on rank 0."""
        if self.is_chief:
            self._facts.note(**values)


def deepspeed_config(stage: int, precision: str = "fp32", **sections: Any) -> dict[str, Any]:
    """Return a DeepSpeed config that needs no compiled operator.

    Args:
        stage: of ZeRO.
        precision: ``fp32``, ``bf16`` or ``fp16``; fp16 starts with a loss scale of 2**32, which overflows.
        sections: further sections, which win.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        # DeepSpeed's buckets of 500 million elements are more memory than these models need.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "steps_per_print": 1_000_000,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1}
    return {**config, **sections}
