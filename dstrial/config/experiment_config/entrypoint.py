"""Read the source of an entrypoint's trial class or script, without importing it."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from dstrial.config.command_line import CommandLine
from dstrial.config.diagnostics import Diagnostics, render

Library = Literal["trainer", "accelerate"]
"""``trainer``: Hugging Face's ``Trainer``. ``accelerate``: the script's own loop with ``accelerate.Accelerator``."""

_TRIAL_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# trl's trainers are subclasses of transformers' Trainer and take the same arguments.
_TRAINER_MODULES = ("transformers", "trl")
_TRAINER_ENDINGS = ("Trainer", "TrainingArguments", "HfArgumentParser")
_MAX_SOURCE_BYTES = 2**17  # ast.parse holds the GIL and blocks the process
_MAX_MODULES = 50  # modules that a script imports and whose source is read


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptSource:
    """A script that an entrypoint starts, with its arguments and training library."""

    path: Path
    arguments: CommandLine  # arguments that the entrypoint passes to the script
    library: Library | None  # training library that the source imports or uses; None if neither


@dataclasses.dataclass(frozen=True, slots=True)
class TrialSource:
    """Facts about the trial class or script of an entrypoint, read from source code."""

    trial: str | None  # `module:Class`; None if the entrypoint starts a script or another command
    mentions_pipeline: bool = False  # whether the class, or a definition that it uses, names `PipelineModule`
    script: ScriptSource | None = None  # None for a trial, and if no script is found


def trial_spec(entrypoint: str | Sequence[str] | None) -> str | None:
    """Return the ``module:Class`` in an entrypoint or its ``--trial``; otherwise None."""
    words = _words(entrypoint)
    if len(words) == 1 and _TRIAL_FORM.fullmatch(words[0]):
        return words[0]
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith("--trial="):
            return word.partition("=")[2]
        if word == "--trial" and following is not None:
            return following
    return None


def find_script(words: Sequence[str], context_dir: Path) -> ScriptSource | None:
    """Return the first Python file or ``-m`` module in an entrypoint's words.

    Only files in ``context_dir`` are found; None if there is none.
    """
    for word_idx, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        is_file = word.endswith(".py") and (context_dir / word).is_file()
        path = context_dir / word if is_file else None
        if before == "-m":
            path = path or _module_file(word, (context_dir,), "__main__.py")
        if path is not None:
            library = _library([*_trees(path, context_dir)])
            return ScriptSource(path, CommandLine.of(words[word_idx + 1 :]), library)
    return None


def check_entrypoint(
    entrypoint: str | Sequence[str] | None, context_dir: Path, findings: Diagnostics
) -> TrialSource:
    """Check that the entrypoint's file exists and defines the trial class.

    Returns facts from the source; problems are recorded in ``findings``.
    """
    trial = trial_spec(entrypoint)
    if trial is None:
        words = _words(entrypoint)
        _check_script(words, context_dir, findings)
        return TrialSource(None, script=find_script(words, context_dir))
    if not _TRIAL_FORM.fullmatch(trial):
        fix = "Write model_def:MyTrial for class MyTrial in model_def.py."
        findings.problem("entrypoint", render(trial), "module:Class", fix)
        return TrialSource(trial)
    module, _, class_name = trial.partition(":")
    path = _module_file(module, (context_dir,))
    if path is None:
        _check_importable(trial, context_dir, findings)
        return TrialSource(trial)
    tree = _trial_tree(trial, path, findings)
    if tree is None:
        return TrialSource(trial)
    names = _defined_names(tree)
    if not {class_name, "*"} & names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        close = difflib.get_close_matches(class_name, classes, n=1) or classes[-1:]
        fix = f"Write {module}:{close[0]}." if close else f"Define class {class_name} in {path}."
        got = f"{render(trial)}, and {path} has no {class_name}"
        findings.problem("entrypoint", got, "an existing class", fix)
    used = _definitions_used(tree, class_name)
    return TrialSource(trial, any("PipelineModule" in _names(node) for node in used))


def _check_importable(trial: str, context_dir: Path, findings: Diagnostics) -> None:
    """Record a problem if the module of ``trial`` (``module:Class``) is not installed.

    Call this if ``context_dir`` has no file of the module. A directory of the module's top-level name in ``context_dir`` is a
    problem even if the module is installed, because the directory hides it.
    """
    module, _, class_name = trial.partition(":")
    top_level = module.split(".")[0]
    if not (context_dir / top_level).is_dir() and _is_importable(top_level):
        return
    wanted = context_dir.joinpath(*module.split(".")).with_suffix(".py")
    close = difflib.get_close_matches(module, [file.stem for file in sorted(context_dir.glob("*.py"))], n=1)
    fix = f"Write {close[0]}:{class_name}." if close else "Correct the module, or pass another CONTEXT_DIR."
    findings.problem("entrypoint", f"{render(trial)}, and {wanted} does not exist", "an existing module", fix)


def _is_importable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False


def _check_script(words: Sequence[str], context_dir: Path, findings: Diagnostics) -> None:
    for before, word in zip(["", *words], words, strict=False):
        if word.endswith(".py") and not before.startswith("-") and not (context_dir / word).exists():
            got, fix = (
                f"{word}, which is not in {context_dir}",
                "Correct the file name, or pass another CONTEXT_DIR.",
            )
            findings.problem("entrypoint", got, "an existing script", fix)
            return


def _words(entrypoint: str | Sequence[str] | None) -> list[str]:
    if not isinstance(entrypoint, str):
        return [str(word) for word in entrypoint or ()]
    try:
        return shlex.split(entrypoint)
    except ValueError:
        return entrypoint.split()


def _trial_tree(trial: str, path: Path, findings: Diagnostics) -> ast.Module | None:
    try:
        return _parsed(path)
    except SyntaxError as error:
        got = f"{render(trial)}, and {path}:{error.lineno} is not Python ({error.msg})"
        findings.problem("entrypoint", got, "a module", "Correct the source.")
    except (OSError, UnicodeDecodeError):
        got = f"{render(trial)}, and {path} is unreadable"
        findings.problem("entrypoint", got, "a module", "Correct the file.")
    return None


def _trees(path: Path, context_dir: Path) -> Iterator[ast.Module]:
    """Yield the syntax trees of a script and of the files that the script imports.

    Imported files are looked up beside the script and in ``context_dir``. Unreadable or invalid files are skipped.
    """
    files = [path]
    for file in files:
        try:
            tree = _parsed(file)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue  # Python reports the error's position when the script runs
        if tree is None:
            continue
        yield tree
        if file == path:
            # A name imported from a package may be a module.
            modules = [f"{module}{end}" for module, name, _ in _imports(tree) for end in ("", f".{name}")]
            found = (_module_file(module.strip("."), (path.parent, context_dir)) for module in modules)
            files += [*dict.fromkeys(file for file in found if file is not None)][:_MAX_MODULES]


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name imported from the module or "", local name) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, "", one.asname or one.name.split(".")[0]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            yield from ((module, one.name, one.asname or one.name) for one in node.names)


def _library(trees: Sequence[ast.Module]) -> Library | None:
    """Return the training library whose classes the files import or use, or None."""
    used: set[tuple[str, str]] = set()
    for tree in trees:
        modules = {local: module.split(".")[0] for module, name, local in _imports(tree) if not name}
        used |= {(module.split(".")[0], name) for module, name, _ in _imports(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add((modules.get(node.value.id, ""), node.attr))
    if any(module in _TRAINER_MODULES and name.endswith(_TRAINER_ENDINGS) for module, name in used):
        return "trainer"
    return "accelerate" if ("accelerate", "Accelerator") in used else None


def _module_file(module: str, roots: Sequence[Path], of_package: str = "__init__.py") -> Path | None:
    for root in roots if module else ():
        base = root.joinpath(*module.split("."))
        for candidate in (base.with_name(f"{base.name}.py"), base / of_package):
            if candidate.is_file():
                return candidate
    return None


def _parsed(path: Path) -> ast.Module | None:
    """Parse a Python file; return None if it is too large or nested too deeply.

    Raises OSError, UnicodeDecodeError or SyntaxError if the file is unreadable or invalid.
    """
    if path.stat().st_size > _MAX_SOURCE_BYTES:
        return None
    source = path.read_text(encoding="utf-8")
    if "\0" in source:
        # Before Python 3.12, ast.parse raises ValueError instead.
        raise SyntaxError("source code string cannot contain null bytes", (str(path), 1, 1, ""))
    try:
        return ast.parse(source, str(path))
    except (RecursionError, MemoryError):
        return None


def _defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports; ``*`` for ``import *``."""
    names = {local for _, _, local in _imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _definitions_used(tree: ast.Module, name: str) -> list[ast.AST]:
    """Return the syntax trees of ``name``'s definition and of all definitions it uses.

    Definitions are the top-level classes and functions of ``tree``. If ``name`` is not one of them, the whole module takes the
    place of its definition.
    """
    # A module may define an ordinary trial and a pipeline, so unrelated definitions are left out.
    definitions = {
        node.name: node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [definitions.pop(name, tree)]
    while waiting:
        found.append(waiting.pop())
        waiting += [definitions.pop(one) for one in sorted(_names(found[-1]) & definitions.keys())]
    return found


def _names(root: ast.AST) -> set[str]:
    names = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(root)}
    return {one for one in names if isinstance(one, str)}
