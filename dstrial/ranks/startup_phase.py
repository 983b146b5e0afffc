"""What a rank does before its first batch, told to its launcher through a file.

The launcher tells people. Each rank writes its own file; without a launcher of ours nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from dstrial.file_writes import replace_file

PHASE_FILE_VARIABLE = "DSTRIAL_PHASE_FILE"
"""Environment variable that names the file in which a rank says what it is doing before its first batch."""

FIRST_BATCH = "training the first batch"

TRAINING = "training"
"""The last phase: batches are trained, and whoever compiles something does not hold this rank up."""


def begin_phase(text: str) -> None:
    """Say what this rank does from now on, such as ``importing model_def``."""
    _write({"phase": text, "since_s": time.time()})


def end_phases() -> None:
    """Say that nothing is known of what this rank does from now on."""
    _write({"phase": "", "since_s": time.time()})


def read_phase(path: Path) -> tuple[str, float] | None:
    """Return what a rank does and since when, epoch seconds; None if it is silent."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return str(fields["phase"]), float(fields["since_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(fields: dict[str, object]) -> None:
    named = os.environ.get(PHASE_FILE_VARIABLE)
    if not named:
        return
    # If the launcher was killed, its directory is gone, and nobody reads the file.
    with contextlib.suppress(OSError):
        replace_file(Path(named), json.dumps(fields), sync=False)
