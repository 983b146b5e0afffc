"""Model definitions: pack uploaded files as gzip tars, and unpack them safely."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import errno
import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dstrial.context_directory import MARKS, MAX_BYTES
from dstrial.errors import MasterError, RequestError

MAX_MEMBERS = 100_000  # files and directories of one model definition
MAX_DEPTH = 100  # nested directories: ``os.walk`` of Python 3.11 fails at some hundred levels
MAX_PATH_BYTES = 1024
"""Longest path of a member; the path of the trial's directory is prepended to it."""

_CHUNK_BYTES = 2**20
_REGULAR, _DIRECTORY = ord("0"), ord("5")  # types of members in a tar file


def pack(files: Iterable[Mapping[str, Any]]) -> bytes:
    """Pack the files of ``POST /experiments`` as a gzip tar; b"" if there are none.

    Equal files result in equal bytes. Directories with a marker file (``context_directory.MARKS``) are excluded.

    Args:
        files: mappings with ``path``, ``type`` (48: file, 53: directory), ``content`` (base64), ``mtime`` (a string of seconds)
            and ``mode``.

    Raises:
        RequestError: 400 for a path outside the directory or a member that is no file or directory, 413 if too large.
    """
    files = list(files)
    # Determined's client also sends directories with a marker file.
    left_out = {
        str(PurePosixPath(path).parent)
        for file in files
        if isinstance(path := file.get("path"), str) and PurePosixPath(path).name in MARKS
    } - {"."}
    buffer = io.BytesIO()
    total = 0
    num_members = 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            member, content = _member(file)
            if left_out and not left_out.isdisjoint(accumulate(member.name.split("/"), "{}/{}".format)):
                continue
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
    """Unpack a model definition into a directory; reject members outside of it.

    Raises:
        RequestError: 400 for a damaged or forbidden archive, 413 if its files are too large.
        MasterError: the files cannot be written.
    """
    try:
        for archive, member, _ in _members(tgz):
            _require_inside(member.name)
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


@dataclasses.dataclass(frozen=True, slots=True)
class PackedFile:
    path: str  # relative to the root of the model definition
    size: int  # bytes
    digest: str  # hash of the content


def list_files(tgz: bytes) -> list[PackedFile]:
    """Return the regular files of a model definition, sorted by path.

    Raises:
        RequestError: 400 for a damaged archive, 413 if its files are too large.
    """
    found: dict[str, PackedFile] = {}
    for archive, member, path in _members(tgz):
        if path is not None and member.isreg():
            found[path] = PackedFile(path, member.size, _digest(archive.extractfile(member)))
    return [found[path] for path in sorted(found)]


def read_start(tgz: bytes, path: str, num_bytes: int) -> tuple[bytes, int]:
    """Return (first ``num_bytes`` bytes, size in bytes) of a model definition's file.

    Raises:
        RequestError: 400 for a path outside the directory or a damaged archive, 404 for a missing file, 413 if the
            archive's files are too large.
    """
    _require_inside(path)
    found = read_starts(tgz, [str(PurePosixPath(path))], num_bytes)
    if not found:
        raise RequestError(
            404, f"{path!r} is not in the model definition; expected a file that the tree of files shows."
        )
    return next(iter(found.values()))


def read_starts(tgz: bytes, paths: Collection[str], num_bytes: int) -> dict[str, tuple[bytes, int]]:
    """Return path -> (first bytes, size) of regular files; omit missing files.

    Raises:
        RequestError: 400 for a damaged archive, 413 if its files are too large.
    """
    found: dict[str, tuple[bytes, int]] = {}
    for archive, member, path in _members(tgz):
        file = archive.extractfile(member) if path in paths and member.isreg() else None
        if file is not None and path is not None:
            found[path] = file.read(num_bytes), member.size
    return found


def _members(tgz: bytes) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str | None]]:
    """Yield (archive, member, path) for each member of a gzip tar.

    The path is relative to the archive's root; None for a member outside the root, and for the root itself.
    """
    if not tgz:
        return
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(tgz), mode="r:gz") as archive:
            for num_members, member in enumerate(archive, start=1):
                total += member.size
                if total > MAX_BYTES or num_members > MAX_MEMBERS:
                    raise RequestError(413, _too_large("the unpacked files"))
                path = str(PurePosixPath(member.name))
                yield archive, member, None if _leads_out(member.name) or path == "." else path
    except (gzip.BadGzipFile, tarfile.TarError, EOFError, ValueError, zlib.error) as error:
        raise _damaged(error) from error


def _digest(file: IO[bytes] | None) -> str:
    digest = hashlib.blake2b(digest_size=12)
    while file is not None and (chunk := file.read(_CHUNK_BYTES)):
        digest.update(chunk)
    return digest.hexdigest()


def _too_long() -> RequestError:
    return RequestError(
        400,
        f"the model definition has a path that is too long; expected at most {MAX_PATH_BYTES} bytes, {MAX_DEPTH} "
        "directories, and names that this machine can hold. Shorten it.",
    )


def _damaged(error: Exception) -> RequestError:
    return RequestError(
        400, f"the model definition is damaged ({error}); expected a gzip tar. Send it again."
    )


def _require_inside(path: str) -> None:
    num_bytes = len(path.encode("utf-8", "surrogateescape"))
    if num_bytes > MAX_PATH_BYTES or len(PurePosixPath(path).parts) > MAX_DEPTH + 1:
        raise _too_long()
    if _leads_out(path):
        raise RequestError(
            400,
            f"modelDefinition: {path!r} leads out of its directory; expected a relative path without '..'. Rename it.",
        )


def _leads_out(path: str) -> bool:
    return not path or "\0" in path or path.startswith("/") or ".." in PurePosixPath(path).parts


def _too_large(what: str) -> str:
    return (
        f"the model definition is too large; expected {what} to have at most {MAX_BYTES // 2**20} MiB "
        f"in {MAX_MEMBERS} members. Leave data out by .detignore."
    )
