"""How this installation's commands are typed where the user is: by their names, or by their paths."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def typed(name: str) -> str:
    """Return what starts a command that was installed beside this Python, ``det`` for example.

    Its name where a shell finds that very command by it; else its path, from the working directory if it lies below.
    """
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.is_file() or (found is not None and Path(found).resolve() == own.resolve()):
        return name
    below = os.path.relpath(own)
    return str(own) if below.startswith(os.pardir) else below
