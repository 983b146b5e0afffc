"""Add a checksum or signature to JSON values, and verify both.

The checksum detects damage of small files that no manifest lists. The signature (HMAC-SHA256 with a secret in the account's
data directory) proves that this account wrote a manifest, and so the files whose checksums the manifest has.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import pathlib
import secrets
import stat
from collections.abc import Mapping
from typing import Any

import platformdirs

from dstrial.file_writes import make_file

logger = logging.getLogger("dstrial.checkpoint")

SIGNATURE_KEY = "signature"
"""Key of the signature, at the top level of a manifest."""

_NUM_BYTES = 32  # length of the secret


def key_path() -> pathlib.Path:
    return pathlib.Path(platformdirs.user_data_dir("dstrial")) / "checkpoint.key"


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with a signature by this account's secret.

    If the account has no secret, a new one is stored. If the secret cannot be stored, the values are returned without a
    signature.
    """
    key = _key(is_made=True)
    rest = {name: value for name, value in values.items() if name != SIGNATURE_KEY}
    return rest if key is None else {**rest, SIGNATURE_KEY: _digest(key, rest)}


def is_own(values: Mapping[str, Any]) -> bool:
    """Return whether JSON values have a valid signature by this account's secret."""
    given = values.get(SIGNATURE_KEY)
    key = _key(is_made=False)
    if not isinstance(given, str) or key is None:
        return False
    rest = {name: value for name, value in values.items() if name != SIGNATURE_KEY}
    return hmac.compare_digest(given.encode(), _digest(key, rest).encode())


def _digest(key: bytes, values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(*, is_made: bool) -> bytes | None:
    path = key_path()
    if not path.is_absolute():  # an account without a home directory: ``~`` is not expanded
        return None
    try:
        if is_made and not path.exists():
            _make(path)
        with path.open("rb") as stream:
            # Check owner and mode of the opened file: no other account may read or write the secret.
            found = os.fstat(stream.fileno())
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                logger.warning(
                    "%s is readable by others, or not this account's: checkpoints are not signed", path
                )
                return None
            key = stream.read(_NUM_BYTES + 1)
    except OSError as error:
        if is_made:
            logger.info("checkpoints are not signed: %s cannot be kept (%s)", path, error.strerror or error)
        return None
    return key if len(key) == _NUM_BYTES else None


def _make(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        make_file(path, secrets.token_bytes(_NUM_BYTES))


CHECKSUM_KEY = "sha256"
"""Key of the checksum, at the top level of JSON values."""


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, CHECKSUM_KEY: _checksum(values)}


def is_intact(values: Mapping[str, Any]) -> bool:
    """Return whether values match their checksum; True if there is no checksum."""
    return CHECKSUM_KEY not in values or values[CHECKSUM_KEY] == _checksum(values)


def _checksum(values: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != CHECKSUM_KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
