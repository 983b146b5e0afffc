"""Find the training library that a script uses, from the script's source."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from dstrial.config.command_line import CommandLine

Library = Literal["trainer", "accelerate"]
"""``trainer``: Hugging Face's ``Trainer``. ``accelerate``: the script's own loop with ``accelerate.Accelerator``."""

# trl's trainers are subclasses of transformers' Trainer and take the same arguments.
_TRAINER_MODULES = ("transformers", "trl")
_TRAINER_ENDINGS = ("Trainer", "TrainingArguments", "HfArgumentParser")
_ACCELERATE_NAMES = ("Accelerator",)
_MAX_SOURCE_BYTES = 2**18
_MAX_SOURCE_WORDS = 40_000
"""Maximum size of a parsed source, in words, because ``ast.parse`` holds the GIL and blocks the process."""
_MAX_MODULES = 50
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptSource:
    """A script that an entrypoint starts, with its arguments and training library."""

    path: Path
    arguments: CommandLine  # arguments that the entrypoint passes to the script
    library: Library | None  # training library; None if the source does not show one


def find_script(words: Sequence[str], context_dir: Path) -> ScriptSource | None:
    """Return an entrypoint's first Python file or ``-m`` module in ``context_dir``."""
    for word_idx, word in enumerate(words):
        if word.endswith(".py") and (context_dir / word).is_file():
            return _script(context_dir / word, words[word_idx + 1 :], context_dir)
        if word == "-m" and word_idx + 1 < len(words):
            path = _module_file(words[word_idx + 1], (context_dir,))
            if path is not None:
                return _script(path, words[word_idx + 2 :], context_dir)
    return None


def _script(path: Path, arguments: Sequence[str], context_dir: Path) -> ScriptSource:
    found = _libraries(path)
    for file in own_modules(path, context_dir):
        found |= _libraries(file)
    library: Library | None = next((name for name in ("trainer", "accelerate") if name in found), None)
    return ScriptSource(path, CommandLine.of(arguments), library)


def own_modules(path: Path, context_dir: Path) -> list[Path]:
    """Return files in ``context_dir`` that a script imports, at most ``_MAX_MODULES``."""
    roots = (path.parent, context_dir)
    found = {
        file: None for module in _imported_modules(path) if (file := _module_file(module, roots)) is not None
    }
    return list(found)[:_MAX_MODULES]


def _libraries(path: Path) -> set[str]:
    """Return the training libraries whose classes a file uses or imports."""
    tree = tree_of(path)
    if tree is None:
        return set()
    modules = dict(_module_aliases(tree))
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(modules.get(node.value.id, ""), node.attr)]
        for module, name in names:
            top_level = module.split(".")[0]
            if top_level in _TRAINER_MODULES and name.endswith(_TRAINER_ENDINGS):
                found.add("trainer")
            elif top_level == "accelerate" and name in _ACCELERATE_NAMES:
                found.add("accelerate")
    return found


def _module_aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name


def _imported_modules(path: Path) -> list[str]:
    """Return the modules that a file imports; relative names lose their leading dots."""
    tree = tree_of(path)
    if tree is None:
        return []
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            # A name imported from a package may be a module.
            found += [package, *(f"{package}.{alias.name}".lstrip(".") for alias in node.names)]
    return found


def _module_file(module: str, roots: Sequence[Path]) -> Path | None:
    if not module:
        return None
    for root in roots:
        base = root.joinpath(*module.split("."))
        for candidate in (base.with_name(f"{base.name}.py"), base / "__main__.py", base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def tree_of(path: Path) -> ast.Module | None:
    """Return a file's syntax tree; None if unreadable, not Python or too large."""
    try:
        return parsed(path)
    except (OSError, UnicodeDecodeError, SyntaxError):
        # Python reports the error's position when the script runs.
        return None


def parsed(path: Path) -> ast.Module | None:
    """Parse a Python file; return None if it is too large or nested too deeply."""
    if path.stat().st_size > _MAX_SOURCE_BYTES:
        return None
    source = path.read_text(encoding="utf-8")
    if "\0" in source:
        # Before Python 3.12, ast.parse raises ValueError instead.
        raise SyntaxError("source code string cannot contain null bytes", (str(path), 1, 1, ""))
    if sum(1 for _ in _WORD.finditer(source)) > _MAX_SOURCE_WORDS:
        return None
    try:
        return ast.parse(source, str(path))
    except (RecursionError, MemoryError):
        return None
