"""A job's shared secret for message tags, and the job's private rendezvous file.

Other accounts (on loopback) or machines (on a network) can send bytes to a rank. Unpickling these bytes could run code, so every
message has an HMAC tag that is verified first. ``DSTRIAL_STORE`` names the rendezvous file of one machine's ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity

SECRET_VARIABLE = "DSTRIAL_SECRET"  # noqa: S105  # the variable's name
"""Environment variable with a job's secret; ``dstrial.launch`` creates one for the ranks of one machine."""

STORE_VARIABLE = "DSTRIAL_STORE"
"""Environment variable with the rendezvous file and its job. Nested launchers inherit it, so ranks must check the job."""

TAG_BYTES = 32
"""Length of a message tag, in bytes."""

# The allocation's session token, equal in all containers of the allocation and unknown outside (Determined 0.38.1,
# master/internal/task: StartAllocationSession once per allocation).
_CLUSTER_VARIABLE = "DET_SESSION_TOKEN"
_KEY_NAME = "dstrial-key-"  # prefix of key files' names
_KEY_BYTES = 32


def new_secret() -> str:
    """Return a new random secret, as text for an environment variable."""
    return secrets.token_hex(_KEY_BYTES)


def key_from_environ(environ: Mapping[str, str]) -> bytes | None:
    """Derive the key for message tags from the environment.

    The key is derived from ``DSTRIAL_SECRET`` or else ``DET_SESSION_TOKEN``; None if neither variable is set.
    """
    text = environ.get(SECRET_VARIABLE) or environ.get(_CLUSTER_VARIABLE)
    return hmac.digest(text.encode(), b"dstrial ranks", "sha256") if text else None


def tag(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the HMAC-SHA256 of a message's parts, each prefixed by its length."""
    # One call of digest is ten times as fast as several updates.
    message = b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))
    return hmac.digest(key, message, "sha256")


def is_same_tag(given: bytes | memoryview, expected: bytes) -> bool:
    """Return whether two tags are equal; the time does not depend on their content."""
    return hmac.compare_digest(given, expected)


@contextlib.contextmanager
def key_through_file(store: Any, *, is_writer: bool) -> Iterator[bytes]:
    """Share a new random key among the ranks of a machine; yield the key.

    One rank, the writer, puts the key into a file that only this account can read. The store tells the other ranks the name of
    the file. If another account changes this name in the store, the ranks reject the file or get different keys.

    Args:
        store: the process group's store, with a prefix that the caller chooses.
        is_writer: whether this rank is the writer.

    Raises:
        RankError: this rank cannot read the file, or another account may have written the file.
        RuntimeError: the writer has exited, or has not set the name within the store's timeout (raised by torch).

    Ranks: all of a machine, collectively. The writer must stay in the block until all ranks have read the key.
    """
    if not is_writer:
        yield _read_key(store.get("key").decode(errors="replace"))
        return
    descriptor, path = tempfile.mkstemp(prefix=_KEY_NAME)  # 0600
    try:
        key = secrets.token_bytes(_KEY_BYTES)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        store.set("key", Path(path).name)
        yield key
    finally:
        Path(path).unlink(missing_ok=True)


def _read_key(name: str) -> bytes:
    """Return the key in the writer's file, which is in the temporary directory.

    Raises:
        RankError: the file cannot be read, or its owner, mode, length or name is not that of a key file.
    """
    path = Path(tempfile.gettempdir(), Path(name).name)
    problem = "has another owner, length, name or mode"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            is_private = stat.S_IMODE(status.st_mode) & 0o077 == 0 and status.st_nlink == 1
            key = file.read(_KEY_BYTES + 1)
        if is_ours and is_private and len(key) == _KEY_BYTES and path.name.startswith(_KEY_NAME):
            return key
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise RankError(
        f"the ranks' key file {str(path)!r} {problem}; expected a file that a rank of this account has just written. "
        f"Set {SECRET_VARIABLE} to the same long random text for all ranks, and the file is not needed."
    )


def store_variable(path: Path, *, port: int, num_ranks: int) -> str:
    """Return the JSON value of ``DSTRIAL_STORE``.

    Args:
        path: a file that does not exist yet, in a directory private to this account.
        port: ``MASTER_PORT`` of the ranks.
        num_ranks: ``WORLD_SIZE`` of the ranks.
    """
    return json.dumps({"path": str(path), "port": port, "num_ranks": num_ranks})


def private_path(environ: Mapping[str, str], identity: RankIdentity) -> str | None:
    """Return the path of the private rendezvous file in ``DSTRIAL_STORE``.

    Return None if the variable is not set or the job has several machines. Also return None if the port or world size
    differs from ``identity``: the variable is then inherited from another job.
    """
    value = environ.get(STORE_VARIABLE)
    if not value:
        return None
    place: dict[str, Any] = json.loads(value)
    is_this_job = (place["port"], place["num_ranks"]) == (identity.master_port, identity.world_size)
    return str(place["path"]) if is_this_job and identity.num_nodes == 1 else None
