"""Find an entrypoint's trial class in the source code, without importing it."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from dstrial.config.auto_values import AutoValues
from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.experiment_config.script_source import (
    ScriptSource,
    find_script,
    own_modules,
    parsed,
    tree_of,
)

_TRIAL_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class TrialSource:
    """Facts about a trial, read from its source code."""

    trial: str | None  # `module:Class`
    mentions_pipeline: bool = False  # whether the class, or a definition that it uses, names `PipelineModule`
    # Values passed as `num_stages`: numbers, and names that may be hyperparameters.
    num_stages: tuple[int | str, ...] = ()
    filler: AutoValues | None = (
        None  # values for `"auto"` in a script's config; None for a trial or if unknown
    )
    trees: tuple[ast.Module, ...] = ()  # syntax trees of a script and the modules beside it, unless too large


def trial_spec(entrypoint: str | Sequence[str] | None) -> str | None:
    """Return an entrypoint's ``module:Class``, also from ``--trial``, or None."""
    words = _words(entrypoint)
    if len(words) == 1 and _TRIAL_FORM.fullmatch(words[0]):
        return words[0]
    for index, word in enumerate(words):
        if word.startswith("--trial="):
            return word.partition("=")[2]
        if word == "--trial" and index + 1 < len(words):
            return words[index + 1]
    return None


def check_entrypoint(
    entrypoint: str | Sequence[str] | None, context_dir: Path, findings: Diagnostics
) -> TrialSource:
    """Check that the entrypoint's file in ``context_dir`` defines the trial class."""
    trial = trial_spec(entrypoint)
    if trial is None:
        _check_script(entrypoint, context_dir, findings)
        script = find_script(_words(entrypoint), context_dir)
        return TrialSource(None, filler=AutoValues.of(script), trees=_trees(script, context_dir))
    if not _TRIAL_FORM.fullmatch(trial):
        fix = "Write model_def:MyTrial for class MyTrial in model_def.py."
        findings.problem("entrypoint", render(trial), "module:Class", fix)
        return TrialSource(trial)
    module, _, class_name = trial.partition(":")
    path = _module_file(module, context_dir)
    if path is None:
        _check_importable(trial, context_dir, findings)
        return TrialSource(trial)
    tree = _tree_of(trial, path, findings)
    if tree is None:
        return TrialSource(trial)
    names, is_complete = _top_level_names(tree)
    if is_complete and class_name not in names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        close = difflib.get_close_matches(class_name, classes, n=1) or classes[-1:]
        fix = f"Write {module}:{close[0]}." if close else f"Define class {class_name} in {path}."
        findings.problem(
            "entrypoint", f"{render(trial)}, and {path} has no {class_name}", "an existing class", fix
        )
    used = _definitions_used(tree, class_name)
    is_pipeline = any("PipelineModule" in _names(node) for node in used)
    num_stages = tuple(_num_stages(used)) if is_pipeline else ()
    return TrialSource(trial, is_pipeline, num_stages)


def _check_importable(trial: str, context_dir: Path, findings: Diagnostics) -> None:
    """Check that a module outside the model definition is an installed package."""
    module, _, class_name = trial.partition(":")
    top_level = module.split(".")[0]
    if not (context_dir / top_level).is_dir() and _is_importable(top_level):
        return
    wanted = context_dir.joinpath(*module.split(".")).with_suffix(".py")
    close = difflib.get_close_matches(module, [file.stem for file in sorted(context_dir.glob("*.py"))], n=1)
    fix = f"Write {close[0]}:{class_name}." if close else "Correct the module, or pass another CONTEXT_DIR."
    findings.problem("entrypoint", f"{render(trial)}, and {wanted} does not exist", "an existing module", fix)


def _tree_of(trial: str, path: Path, findings: Diagnostics) -> ast.Module | None:
    """Return a module's syntax tree; None if it is unreadable or too large."""
    try:
        return parsed(path)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        fix = "Correct the source."
        findings.problem(
            "entrypoint", f"{render(trial)}, and {where} is not Python ({error.msg})", "a module", fix
        )
    except (OSError, UnicodeDecodeError):
        findings.problem(
            "entrypoint", f"{render(trial)}, and {path} is unreadable", "a module", "Correct the file."
        )
    return None


def _trees(script: ScriptSource | None, context_dir: Path) -> tuple[ast.Module, ...]:
    if script is None:
        return ()
    files = [script.path, *own_modules(script.path, context_dir)]
    return tuple(tree for file in files if (tree := tree_of(file)) is not None)


def _definitions_used(tree: ast.Module, name: str) -> list[ast.AST]:
    """Return the definition of ``name``, and all definitions that it uses."""
    # A module may define an ordinary trial and a pipeline, so unrelated definitions are left out. If the module does
    # not define the name itself, the whole module counts.
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


def _num_stages(used: Sequence[ast.AST]) -> Iterator[int | str]:
    """Yield the numbers and names in the values of keyword arguments ``num_stages``."""
    nodes = [node for root in used for node in ast.walk(root)]
    waiting = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "num_stages"]
    values = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for value in waiting:
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and node.id in values:
                waiting.append(values.pop(node.id))
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, (int, str)):
                yield node.value


def _words(entrypoint: str | Sequence[str] | None) -> list[str]:
    if entrypoint is None:
        return []
    if not isinstance(entrypoint, str):
        return [str(word) for word in entrypoint]
    try:
        return shlex.split(entrypoint)
    except ValueError:
        return entrypoint.split()


def _check_script(entrypoint: str | Sequence[str] | None, context_dir: Path, findings: Diagnostics) -> None:
    for before, word in zip(["", *_words(entrypoint)], _words(entrypoint), strict=False):
        if word.endswith(".py") and not before.startswith("-") and not (context_dir / word).exists():
            fix = "Correct the file name, or pass another CONTEXT_DIR."
            findings.problem(
                "entrypoint", f"{word}, which is not in {context_dir}", "an existing script", fix
            )
            return


def _module_file(module: str, context_dir: Path) -> Path | None:
    base = context_dir.joinpath(*module.split("."))
    for candidate in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _is_importable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Return a module's names, and whether they are complete (no ``import *``)."""
    names: set[str] = set()
    is_complete = True
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names.add((alias.asname or alias.name).split(".")[0])
                is_complete = is_complete and alias.name != "*"
    return names, is_complete
