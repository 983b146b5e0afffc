"""Model definitions: packs the protocol's files as gzip tars, unpacks them safely."""

from __future__ import annotations

import base64
import binascii
import errno
import gzip
import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dstrial.errors import MasterError, RequestError

MAX_BYTES = 95 * 1024 * 1024
"""Most bytes that the files of a model definition have together, as in Determined's client."""
MAX_MEMBERS = 100_000
MAX_PATH_BYTES = 1024
"""Longest path of a member; the directory in which a trial runs has to fit in front of it."""

_REGULAR, _DIRECTORY = ord("0"), ord("5")


def pack(files: Iterable[Mapping[str, Any]]) -> bytes:
    """Pack the files of ``POST /experiments``; equal files give equal bytes.

    Args:
        files: ``path``, ``type`` (48 a file, 53 a directory), ``content`` (base64), ``mtime`` (seconds, a string), ``mode``.

    Raises:
        RequestError: 400 for a path that leads out or a member that is no file or directory, 413 for too much.
    """
    buffer = io.BytesIO()
    total = 0
    num_members = 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            member, content = _member(file)
            total += len(content)
            num_members += 1
            if total > MAX_BYTES or num_members > MAX_MEMBERS:
                raise RequestError(413, _too_large("the files together"))
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue() if num_members else b""


def _member(file: Mapping[str, Any]) -> tuple[tarfile.TarInfo, bytes]:
    path = file.get("path")
    if not isinstance(path, str):
        raise RequestError(
            400, f"modelDefinition: a path is {path!r}; expected a string. Send the file's path."
        )
    _require_inside(path)
    member = tarfile.TarInfo(str(PurePosixPath(path)))
    try:
        kind = int(file.get("type") or _REGULAR)
        member.mode = int(file.get("mode") or 0o644) & 0o755 | 0o600
        member.mtime = min(max(int(file.get("mtime") or 0), 0), 2**33)
        content = base64.b64decode(file.get("content") or "", validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise RequestError(
            400,
            f"modelDefinition: {path} has a wrong field ({error}); expected numbers and base64. Send it again.",
        ) from error
    if kind == _DIRECTORY:
        member.type = tarfile.DIRTYPE
        member.mode |= 0o700
        return member, b""
    if kind != _REGULAR:
        raise RequestError(
            400,
            f"modelDefinition: {path} is of type {kind}; expected a file (48) or a directory (53). "
            "Leave it out by .detignore, or copy what it points to.",
        )
    member.size = len(content)
    return member, content


def unpack(tgz: bytes, directory: Path) -> None:
    """Unpack a model definition; nothing is written outside ``directory``.

    Raises:
        RequestError: 400 for an archive that is damaged or whose members lead out or are no files, directories or links
            within it; 413 for one that unpacks to too much.
        MasterError: this machine cannot hold the files.
    """
    if not tgz:
        return
    total = 0
    num_members = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(tgz), mode="r:gz") as archive:
            for member in archive:
                _require_inside(member.name)
                total += member.size
                num_members += 1
                if total > MAX_BYTES or num_members > MAX_MEMBERS:
                    raise RequestError(413, _too_large("the unpacked files"))
                archive.extract(member, directory, filter="data")
    except tarfile.FilterError as error:
        raise RequestError(
            400,
            f"the model definition has a member that is not allowed ({error}); expected plain files. Leave it out.",
        ) from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise RequestError(
            400,
            "the model definition has a file where it has a directory; expected one of the two. Rename one.",
        ) from error
    except gzip.BadGzipFile as error:
        raise _damaged(error) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise MasterError(
                f"the model definition cannot be unpacked in {directory} ({error.strerror}); expected room for it. "
                "Make some."
            ) from error
        raise _too_long() from error
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _damaged(error) from error


def _too_long() -> RequestError:
    return RequestError(
        400,
        f"the model definition has a path that is too long; expected at most {MAX_PATH_BYTES} bytes, and names that this "
        "machine can hold. Shorten it.",
    )


def _damaged(error: Exception) -> RequestError:
    return RequestError(
        400, f"the model definition is damaged ({error}); expected a gzip tar. Send it again."
    )


def _require_inside(path: str) -> None:
    if len(path.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
        raise _too_long()
    parts = PurePosixPath(path).parts
    if not path or "\0" in path or path.startswith("/") or ".." in parts:
        raise RequestError(
            400,
            f"modelDefinition: {path!r} leads out of its directory; expected a relative path without '..'. Rename it.",
        )


def _too_large(what: str) -> str:
    return (
        f"the model definition is too large; expected {what} to have at most {MAX_BYTES // 2**20} MiB "
        f"in {MAX_MEMBERS} members. Leave data out by .detignore."
    )
