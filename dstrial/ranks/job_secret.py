"""What only a job's processes share: a secret, for tags on messages, and a file.

Whoever may connect to a rank (another account of the machine on loopback, another machine on a network) can send it
anything. What is decoded here, and could run code while it is, carries a tag that is checked first. The ranks of one machine
meet in the file that ``DSTRIAL_STORE`` names.
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
"""Environment variable with a job's secret; ``dstrial.launch`` makes one for ranks of one machine."""

STORE_VARIABLE = "DSTRIAL_STORE"
"""Environment variable with the file and, because other launchers that run below ours pass it on, the job it is for."""

TAG_BYTES = 32
"""Length of a tag."""

# The session token of the allocation: the same in all its containers, and unknown outside of them (Determined 0.38.1,
# master/internal/task: StartAllocationSession once per allocation).
_CLUSTER_VARIABLE = "DET_SESSION_TOKEN"
_KEY_NAME = "dstrial-key-"
_KEY_BYTES = 32


def new_secret() -> str:
    """Return a secret for a job, as text for an environment variable."""
    return secrets.token_hex(_KEY_BYTES)


def key_from_environ(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's key by ``DSTRIAL_SECRET``, else a cluster's token, else None."""
    text = environ.get(SECRET_VARIABLE) or environ.get(_CLUSTER_VARIABLE)
    return hmac.digest(text.encode(), b"dstrial ranks", "sha256") if text else None


def tag(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the tag of a message: HMAC-SHA256 over its parts, each with its length."""
    # In one call, which takes a tenth of the time of several updates.
    message = b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))
    return hmac.digest(key, message, "sha256")


def is_same_tag(given: bytes | memoryview, expected: bytes) -> bool:
    """Compare two tags, in a time that tells nothing about them."""
    return hmac.compare_digest(given, expected)


@contextlib.contextmanager
def key_through_file(store: Any, *, is_writer: bool) -> Iterator[bytes]:
    """Give the ranks of a machine a key for the block; their launcher gave none.

    The writer leaves it in a file that only this account can read, and says in the store where. The store may be open to
    other accounts: they can name another file there, and then the ranks refuse it or have different keys.

    Args:
        store: of the process group; used under a prefix of the caller's own.
        is_writer: True on one rank.

    Raises:
        RankError: the file cannot be read here, or is not one of this account's.
        RuntimeError: torch's, where the writer does not come or has gone.

    Ranks: all of a machine; the block may end when all have read.
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
    """Read the key file of another rank of this account.

    Another account can neither make such a file (the owner is compared) nor know what is in one.
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
        f"Set {SECRET_VARIABLE} to the same long random text for all ranks, and nobody needs the file."
    )


def store_variable(path: Path, *, port: int, num_ranks: int) -> str:
    """Return the value of ``DSTRIAL_STORE``.

    Args:
        path: of a file that does not exist, in a directory that only this account can enter.
        port: ``MASTER_PORT`` of the ranks.
        num_ranks: ``WORLD_SIZE`` of the ranks.
    """
    return json.dumps({"path": str(path), "port": port, "num_ranks": num_ranks})


def store_variable_of_generation(value: str, *, port: int, generation: int) -> str:
    """Return ``DSTRIAL_STORE`` for restarted ranks, which have their own port."""
    place = json.loads(value)
    return json.dumps({**place, "path": f"{place['path']}.{generation}", "port": port})


def private_path(environ: Mapping[str, str], identity: RankIdentity) -> str | None:
    """Return the file in which this job's ranks meet, None if the launcher made none.

    Args:
        environ: of this rank.
        identity: who it is; a file for another port, number of ranks or several machines is not this job's.
    """
    value = environ.get(STORE_VARIABLE)
    if not value:
        return None
    place: dict[str, Any] = json.loads(value)
    is_this_job = (place["port"], place["num_ranks"]) == (identity.master_port, identity.world_size)
    return str(place["path"]) if is_this_job and identity.num_nodes == 1 else None
