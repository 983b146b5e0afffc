"""Map files that torch has written, so that only what is used is read."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

from dstrial.engine.checkpoint_reader.safe_load import load
from dstrial.errors import CheckpointDamagedError


def load_mapped(path: pathlib.Path, *, holds: str, trusts_code: bool = False) -> dict[str, Any]:
    """Load what lies in a file, its tensors mapped, on the CPU.

    Args:
        path: of the file.
        holds: what it should hold, for the message.
        trusts_code: whether somebody vouches for the file, so that it may run code where the list does not suffice.

    Raises:
        CheckpointDamagedError: it is missing or cannot be read.
        UntrustedCheckpointError: it holds classes that are not on the list.
        ImportError, AttributeError: it is trusted, and holds objects of a class that cannot be imported here.

    Ranks: any; no communication.
    """
    try:
        loaded: dict[str, Any] = load(path, mmap=True, trusts_code=trusts_code)
    except FileNotFoundError:
        raise CheckpointDamagedError(
            f"{path} is missing; expected {holds}. Restore it, or use another checkpoint."
        ) from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointDamagedError(
            f"{path} cannot be read ({error}); expected {holds}, as torch has written it. Use another checkpoint."
        ) from error
    return loaded
