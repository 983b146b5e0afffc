"""Support for training loops of other libraries: ``huggingface``, ``accelerate``."""

from __future__ import annotations

import importlib.util

from dstrial.errors import MissingExtraError, install_command


def require(*packages: str, extra: str, who: str) -> None:
    """Raise MissingExtraError if one of ``packages`` is not installed.

    ``extra`` is dstrial's extra that installs the packages; ``who`` is the module that needs the packages. Both names are
    shown in the error.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{who} needs {', '.join(missing)}, which is not installed; expected the extra {extra!r} of dstrial. "
            f"Run: {install_command(extra)}"
        )
