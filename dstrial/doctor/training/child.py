"""The process of one check.

``python -m dstrial.doctor.training.child MODULE DIRECTORY SCRATCH SECONDS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, NotApplicableError, Status
from dstrial.doctor.training.processes import MARKER_VARIABLE, end_marked
from dstrial.doctor.training.runner import ANSWER_NAME
from dstrial.errors import DstrialError
from dstrial.local.json_files import write_json_atomically

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(module: str, directory: Path, scratch: Path, seconds: float) -> int:
    """Run a check and write its answer; returns the exit status, 0 with an answer."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_parent()
    write_json_atomically(
        directory / ANSWER_NAME, answer_of(module, Bench(directory, scratch, time.monotonic() + seconds))
    )
    return 0


def _end_with_parent() -> None:
    """End this check and all it has started when the command that runs it is killed."""

    def end(number: int, frame: object) -> None:
        del frame
        end_marked(os.environ.get(MARKER_VARIABLE, ""))
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def answer_of(module: str, bench: Bench) -> Mapping[str, Any]:
    """Run a check, as ``Check.module`` names it, and return its answer as JSON values."""
    module, _, function = module.partition(":")
    try:
        found = getattr(importlib.import_module(module), function or "run")(bench)
    except NotApplicableError as none:
        return {"status": Status.NOT_APPLICABLE.value, "summary": str(none), "advice": none.advice}
    except CheckFailedError as failed:
        return {
            "status": Status.FAILED.value,
            "summary": str(failed),
            "advice": failed.advice,
            "output": failed.output,
        }
    except Exception as error:  # noqa: BLE001  # this is the process's main: what a check raises is its answer
        traceback.print_exc()
        return {
            "status": Status.FAILED.value,
            "summary": f"{type(error).__name__}: {error}",
            "advice": "Follow the message."
            if isinstance(error, DstrialError)
            else "Read the traceback, below.",
            "output": traceback.format_exc(),
        }
    return {"status": Status.OK.value, "summary": found.summary, "not_shown": found.not_shown}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])))
