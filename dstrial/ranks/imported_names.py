"""Tells an embedded master what the ranks of a trial import."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE

IMPORTED_NAME = "imported.json"
"""File of an allocation's directory, which the master reads."""
# Of the first three much is imported late, and not for every trial; a finder answers for some names of Determined in processes
# that dstrial starts, and is not there where modules are imported ahead.
_NEVER_AHEAD = ("torch", "deepspeed", "triton", "determined", "dstrial", "sitecustomize")


def note_imports() -> None:
    """Tell an embedded master what the first rank has imported of installed packages.

    Ranks that it starts later are forks of a process that has imported them, too. torch and DeepSpeed are left out: what they
    import late, as torch's compiler, is not for every trial.
    """
    directory = os.environ.get(ALLOCATION_DIR_VARIABLE)
    if not directory or os.environ.get("RANK") != "0":
        return
    places = {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")}
    names = []
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        is_installed = isinstance(file, str) and any(file.startswith(place) for place in places)
        if is_installed and name.partition(".")[0] not in _NEVER_AHEAD:
            names.append(name)
    with contextlib.suppress(OSError):  # The next trials import it again.
        replace_file(Path(directory) / IMPORTED_NAME, json.dumps(names), sync=False)
