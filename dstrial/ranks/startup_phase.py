"""Report a rank's startup phase to the launcher through a file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from dstrial.file_writes import replace_file

PHASE_FILE_VARIABLE = "DSTRIAL_PHASE_FILE"
"""Environment variable with the file to which a rank writes its startup phase."""

FIRST_BATCH = "training the first batch"
"""The phase before ``TRAINING``; DeepSpeed may still compile extensions in it."""

TRAINING = "training"
"""The last phase, in which batches are trained and builds of extensions no longer block this rank."""


def begin_phase(text: str) -> None:
    """Set this rank's current phase, such as ``importing model_def``.

    A no-op if no launcher reads phases (``PHASE_FILE_VARIABLE`` is not set).
    """
    _write({"phase": text, "since_s": time.time()})


def end_phases() -> None:
    """Set this rank's phase to "", which means that the startup has ended."""
    _write({"phase": "", "since_s": time.time()})


def read_phase(path: Path) -> tuple[str, float] | None:
    """Return (phase, start of the phase in epoch seconds) from a rank's phase file.

    The phase is "" after ``end_phases``. Return None if the file is missing or unreadable.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return str(fields["phase"]), float(fields["since_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(fields: dict[str, object]) -> None:
    named = os.environ.get(PHASE_FILE_VARIABLE)
    if not named:
        return
    # If the launcher was killed, its directory is deleted and nothing reads the file.
    with contextlib.suppress(OSError):
        replace_file(Path(named), json.dumps(fields), sync=False)
