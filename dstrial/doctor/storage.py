"""Check the directories of training output: permissions, free space, file system.

A directory that does not exist is not created: its nearest existing parent is checked.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within
from dstrial.launch.stale_locks import file_system_of
from dstrial.visible_text import size_text

_GIB = 1 << 30
_DIRECTORY_TIMEOUT_S = 8.0
_NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "fuse.sshfs",
}
_ELSEWHERE = "Choose another directory, or change the rights on this one."


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """Facts about a directory that training writes to."""

    name: str
    path: str
    file_system: str  # such as ``ext4``; empty if unknown
    free_bytes: int
    free_files: int | None  # None if unlimited
    error: str = ""  # why the directory is not writable


def measure(places: Sequence[tuple[str, Path]]) -> list[Directory | Finding]:
    """Inspect directories, given as (name, path), and their file systems.

    A directory that cannot be inspected, or whose file system hangs, gives a finding instead.
    """
    found: list[Directory | Finding] = []
    for name, path in places:
        try:
            found.append(within(_DIRECTORY_TIMEOUT_S, lambda n=name, p=path: _inspect(n, p)))  # type: ignore[misc]
        except OSError as error:
            found.append(problem(name, f"{path} cannot be inspected: {error.strerror or error}", _ELSEWHERE))
        except NoAnswerError as error:
            todo = "Look at the server of that file system, or choose another directory."
            found.append(problem(name, f"{path}: {error}", todo))
    return found


def _inspect(name: str, path: Path) -> Directory:
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    facts = os.statvfs(at)
    error = ""
    try:
        if not at.is_dir():
            raise NotADirectoryError(0, "it is no directory")
        with tempfile.TemporaryFile(dir=at) as file:  # unnamed, so that a killed command leaves no file
            file.write(b"x" * 4096)
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as caught:
        error = caught.strerror or str(caught)
    return Directory(
        name=name,
        path=str(path),
        file_system=file_system_of(at),
        free_bytes=facts.f_bavail * facts.f_frsize,
        free_files=facts.f_favail if facts.f_files else None,
        error=error,
    )


def judge(directories: Sequence[Directory | Finding]) -> list[Finding]:
    found = []
    for directory in directories:
        found += [directory] if isinstance(directory, Finding) else judge_directory(directory)
    return found


def judge_directory(directory: Directory) -> list[Finding]:
    name, free = directory.name, size_text(directory.free_bytes)
    if directory.error:
        return [problem(name, f"{directory.path} cannot be written to: {directory.error}", _ELSEWHERE)]
    facts = [directory.path, directory.file_system, f"{free} free"]
    found = [ok(name, ", ".join(fact for fact in facts if fact))]
    if directory.free_bytes < 10 * _GIB:
        what = (
            f"{free} free: a checkpoint of a model with N billion parameters and Adam takes 14 N GiB or more"
        )
        todo = "Free some, or choose a directory on another disk."
        found.append((problem if directory.free_bytes < _GIB else note)(f"{name} space", what, todo))
    if directory.free_files is not None and directory.free_files < 10_000:
        what = f"{directory.free_files} more files can be made"
        found.append(problem(f"{name} files", what, "Remove files that are not needed."))
    if directory.file_system in _NETWORK_FILE_SYSTEMS and name == "state":
        what = f"on a network file system ({directory.file_system}), where SQLite's locks may not hold"
        todo = "Put the state directory on a local disk (`dstrial up --state-dir`); checkpoints may stay."
        found.append(note(f"{name} place", what, todo))
    return found
