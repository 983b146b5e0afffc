"""Select the files of a context directory (model definition) to send to a master.

Files that match ``.detignore``, outputs of dstrial, checkpoint storages and virtual environments are not selected.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.errors import ConfigError, ConfigProblem
from dstrial.storage_guard import STORAGE_MARKER

if TYPE_CHECKING:
    from determined.common.api.bindings import v1File

OUTPUT_MARK = ".dstrial-output"
"""Name of the marker file in output directories of dstrial."""

MARKS = frozenset({OUTPUT_MARK, STORAGE_MARKER, "pyvenv.cfg"})
"""Names of marker files: a subdirectory with one of these files is left out."""

MAX_BYTES = 95 * 2**20
"""Maximum size of a context's files in bytes, as in Determined's client."""

# Copy of DEFAULT_DETIGNORE in Determined 0.38.1 ``common/constants.py``, whose import takes as long as all of `dstrial check`.
DEFAULT_PATTERNS = (
    "__pycache__/",
    "*.py[co]",
    "*$py.class",
    "terraform",
    "terraform_data",
    "terraform.tfstate*",
    "terraform.tfvars*",
    ".terraform*",
    ".git/",
    ".vscode/",
    ".idea/",
    ".mypy_cache/",
    "/shared_fs",
)


def make_output_directory(path: Path) -> None:
    """Create a directory and its parents; mark the topmost new one as output.

    The mark is the file ``OUTPUT_MARK``; ``list_context`` leaves out directories that contain it. If ``path`` exists, nothing
    is changed.
    """
    highest = path
    while not highest.parent.exists():
        highest = highest.parent
    is_new = not highest.exists()
    path.mkdir(parents=True, exist_ok=True)
    if is_new:
        (highest / OUTPUT_MARK).touch()


def is_marked(path: Path) -> bool:
    """Return whether a directory has a marker file, so that ``list_context`` omits it."""
    return any(os.path.exists(path / mark) for mark in MARKS)  # noqa: PTH110  # False where the directory may not be entered


@dataclasses.dataclass(frozen=True, slots=True)
class ContextFile:
    """A file or directory of a context directory.

    Attributes:
        name: path relative to the context directory, with slashes.
        path: path on this machine.
        size: size in bytes; 0 for a directory.
        is_directory: whether the entry is a directory.
    """

    name: str
    path: Path
    size: int = 0
    is_directory: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The files of a context directory (model definition) to send to a master.

    Attributes:
        root: absolute path of the context directory.
        files: files and directories to send, each directory before its contents.
        left_out: paths of directories with a marker file, each ending in a slash, and paths that are not UTF-8.
    """

    root: Path
    files: tuple[ContextFile, ...]
    left_out: tuple[str, ...]

    @property
    def num_files(self) -> int:
        """Number of files, without directories."""
        return sum(not file.is_directory for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def largest(self) -> tuple[str, int]:
        """Return (name, bytes) of the largest top-level file or directory.

        The name of a directory ends in a slash. Without files the result is ``("", 0)``.
        """
        sizes: dict[str, int] = {}
        for file in self.files:
            top, slash, _ = file.name.partition("/")
            name = f"{top}/" if slash or file.is_directory else top
            sizes[name] = sizes.get(name, 0) + file.size
        return max(sizes.items(), key=lambda item: item[1], default=("", 0))

    def require_packable(self) -> None:
        """Raise ConfigError if the files exceed ``MAX_BYTES``."""
        if self.num_bytes <= MAX_BYTES:
            return
        name, size = self.largest()
        problem = ConfigProblem(
            "CONTEXT_DIR",
            f"{self.root}, which has {_megabytes(self.num_bytes)}, {name} alone {_megabytes(size)}",
            f"a context directory of at most {_megabytes(MAX_BYTES)}",
            "Name what the trial does not need in a file .detignore there, with the patterns of .gitignore.",
        )
        raise ConfigError([problem])

    def v1_files(self) -> list[v1File]:
        """Read the files into Determined's ``v1File`` messages.

        Raises:
            ConfigError: the files exceed ``MAX_BYTES``.
        """
        from determined.common import v1file_utils

        self.require_packable()
        return [
            v1file_utils.v1File_from_local_dir(file.name, file.path)
            if file.is_directory
            else v1file_utils.v1File_from_local_file(file.name, file.path)
            for file in self.files
        ]


def list_context(directory: Path) -> Context:
    """List the files of a context directory (model definition) to send to a master.

    The rules are those of Determined's client. In addition, directories with a marker file are left out. Links to directories
    are not followed. Unreadable and special files are left out.

    Raises:
        ConfigError: ``.detignore`` is not UTF-8.
    """
    import pathspec

    root = directory.resolve()
    ignore_path = root / ".detignore"
    try:
        lines = ignore_path.read_text(encoding="utf-8").splitlines() if ignore_path.is_file() else []
    except UnicodeDecodeError as error:
        raise ConfigError(
            [ConfigProblem(str(ignore_path), f"no UTF-8 ({error})", "patterns in UTF-8", "Save it as UTF-8.")]
        ) from None
    patterns = [*DEFAULT_PATTERNS, *lines]
    ignored = pathspec.PathSpec.from_lines("gitwildmatch", patterns)
    found: list[ContextFile] = []
    left_out: list[str] = []
    for parent, directories, names in os.walk(root):
        below = Path(parent).relative_to(root)
        kept = []
        for name in _in_utf8(directories, below, left_out):
            relative = (below / name).as_posix()
            if ignored.match_file(relative) or ignored.match_file(f"{relative}/"):
                continue
            path = root / relative
            if is_marked(path):
                left_out.append(f"{relative}/")
                continue
            kept.append(name)
            found.append(ContextFile(relative, path, is_directory=True))
        directories[:] = kept
        for name in _in_utf8(names, below, left_out):
            relative = (below / name).as_posix()
            path = root / relative
            if name == ".detignore" or ignored.match_file(relative):
                continue
            if os.path.isfile(path) and os.access(path, os.R_OK):  # noqa: PTH113  # False behind a link into a private directory
                found.append(ContextFile(relative, path, path.stat().st_size))
    return Context(root, tuple(found), tuple(left_out))


def _in_utf8(names: list[str], below: Path, left_out: list[str]) -> list[str]:
    kept = []
    for name in names:
        try:
            name.encode()
            kept.append(name)
        except UnicodeEncodeError:
            left_out.append(os.fsencode(below / name).decode(errors="backslashreplace"))
    return kept


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MB"
