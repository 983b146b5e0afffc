"""Record printed, stored and sent data; compare it with the committed goldens.

``python tests/goldens/record.py [RECORDER ...]`` prints the differences; ``--update`` also rewrites the goldens.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from normalization import with_last_digits_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = HERE / "files"

Recorder: TypeAlias = "Callable[[Path], Mapping[str, str]]"

RECORDERS = {
    "help": "golden_command_line:help_texts",
    "check": "golden_command_line:checks",
    "schema": "golden_master:schema",
    "search": "golden_dsat:search",
    "answers": "golden_master:answers",
    "allocation": "golden_allocation:allocation",
    "runs": "golden_runs:runs",
    "submissions": "golden_dsat:submissions",
    "fingerprints": "golden_master:fingerprints",
}
"""Name -> ``module:function``, which maps an empty directory to file name -> text."""

_WIDE = 160


def recorded(name: str, scratch: Path) -> dict[str, str]:
    """Run recorder ``name`` in an empty directory; return file name -> text."""
    module, _, function = RECORDERS[name].partition(":")
    recorder: Recorder = getattr(importlib.import_module(module), function)
    with inside(ROOT):
        return dict(recorder(scratch))


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Change the working directory in the block; ``contextlib.chdir`` is newer (3.11)."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def committed(name: str) -> dict[str, str]:
    """Return the committed goldens of a recorder: file name -> text."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((FILES / name).glob("*"))}


def differences(old: Mapping[str, str], new: Mapping[str, str], name: str) -> str:
    """Return a unified diff of all files; empty if all are equal."""
    lines: list[str] = []
    for file in sorted({*old, *new}):
        before, after = old.get(file), new.get(file)
        if before is not None and after is not None:
            after = with_last_digits_of(before, after)
        if before != after:
            label = f"{name}/{file}"
            lines += difflib.unified_diff(
                _shown(before), _shown(after), f"golden {label}", f"recorded {label}", lineterm="", n=2
            )
    return "\n".join(lines)


def _shown(text: str | None) -> list[str]:
    """Split text into lines for a diff, and long lines of JSON at their keys."""
    if text is None:
        return []
    shown: list[str] = []
    for line in text.split("\n"):
        broken = line.replace(', "', ',\n    "').replace(',"', ',\n    "') if len(line) > _WIDE else line
        shown += broken.split("\n")
    return shown


def update(name: str, new: Mapping[str, str]) -> None:
    """Replace the committed goldens of a recorder."""
    folder = FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*"):
        path.unlink()
    for file, text in new.items():
        (folder / file).write_text(text, encoding="utf-8")


def main() -> int:
    """Compare or update the goldens; return 1 if a comparison finds differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"recorders ({' '.join(RECORDERS)}); default: all"
    )
    parser.add_argument("--update", action="store_true", help="write the goldens anew")
    args = parser.parse_args()
    sys.path[:0] = [str(HERE)]
    status = 0
    for name in args.names or RECORDERS:
        with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            new = recorded(name, Path(scratch).resolve())
        difference = differences(committed(name), new, name)
        print(difference or f"{name}: equal")
        status = status or int(bool(difference))
        if args.update and difference:
            update(name, new)
    return 0 if args.update else status


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
