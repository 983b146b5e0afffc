"""Integrate training loops of other libraries: ``huggingface``, ``accelerate``.

Each package needs its library, which is an optional extra of dstrial; nothing else imports them.
"""

from __future__ import annotations

import importlib.util

from dstrial.errors import MissingExtraError, install_command


def require(*packages: str, extra: str, who: str) -> None:
    """Raise MissingExtraError unless the ``packages`` of ``extra`` can be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{who} needs {', '.join(missing)}, which is not installed; expected the extra {extra!r} of dstrial. "
            f"Run: {install_command(extra)}"
        )
