"""What all programs share: their arguments, their facts, their warnings."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from dstrial.doctor.training.facts import Facts
from dstrial.ranks import process_group
from dstrial.ranks.control import timeout_from_environ
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
        """Bring up the process group once, for several trainings one after the other in these ranks. Ranks: all.

        A group that is ended and begun again meets the keys of the first in torchrun's store, and hangs.
        """
        identity = identify(os.environ)
        process_group.init_process_group(identity, timeout_s=timeout_from_environ())
        process_group.keep()

    def may_go_on_after(self, error: Exception) -> bool:
        """Say whether this rank may try the next configuration: it may where no other rank waits for it."""
        if self.is_alone:
            traceback.print_exception(error)
        return self.is_alone

    def note(self, **values: Any) -> None:
        """Keep what was found, on rank 0."""
        if self.is_chief:
            self._facts.note(**values)
