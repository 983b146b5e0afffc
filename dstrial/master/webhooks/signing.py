"""Webhook signatures, and the key by which receivers know this master.

Source: Determined 0.38.1 ``master/internal/webhooks/shipper.go``: HMAC-SHA256 of the time in whole seconds, a comma and the
body, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.file_writes import make_file

TIMESTAMP_HEADER = "X-Determined-AI-Signature-Timestamp"
SIGNATURE_HEADER = "X-Determined-AI-Signature"


def load_key(path: Path, configured: str | None) -> str:
    """Return the configured key, else that of the state directory's file.

    Raises:
        MasterError: the file cannot be read or made, or is empty.
    """
    if configured is not None:
        return configured
    try:
        with contextlib.suppress(FileExistsError):
            _make(path)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MasterError(
            f"the key of webhooks {path} cannot be used ({error}); expected a file that its owner can read. Remove it to "
            "have another made."
        ) from error
    if not key:
        raise MasterError(
            f"the key of webhooks {path} is empty; expected a key. Remove it to have another made."
        )
    return key


def signature(key: str, timestamp_s: int, body: bytes) -> str:
    return hmac.new(key.encode(), f"{timestamp_s},".encode() + body, hashlib.sha256).hexdigest()


def _make(path: Path) -> None:
    make_file(path, f"{secrets.token_hex(32)}\n")
