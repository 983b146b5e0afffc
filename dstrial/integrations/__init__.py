"""Support for training loops of other libraries: ``huggingface``, ``accelerate``.

Each subpackage needs its library, which is an optional extra of dstrial. No other part of dstrial imports these libraries.
"""

from __future__ import annotations

import importlib.util

from dstrial.errors import MissingExtraError, install_command


def require(*packages: str, extra: str, who: str) -> None:
    """Raise MissingExtraError if one of ``packages`` is not installed.

    ``extra`` is the extra of dstrial that installs them; ``who`` is the module that needs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{who} needs {', '.join(missing)}, which is not installed; expected the extra {extra!r} of dstrial. "
            f"Run: {install_command(extra)}"
        )
