"""What DeepSpeed 0.19 refuses in old code, as far as its source shows it. Pure.

It reads the calls and the last assignments of their arguments, and imports nothing. What it cannot see is found at run time,
with the same words from ``dstrial/engine/deepspeed_internals/engines.py``.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from dstrial.config.diagnostics import Diagnostics
from dstrial.errors import ConfigProblem

_CONFIG_KEYWORDS = ("config", "config_params")
_STOPS_GRADIENTS = ("detach", "item", "module")
# A master reads sources of others, so what is looked at is bounded.
_MAX_CALLS = 50
_MAX_NAME_PARTS = 8

Assignments: TypeAlias = "Mapping[str, tuple[list[int], list[ast.expr]]]"
"""Name -> lines on which it is assigned, ascending, and what."""


@dataclasses.dataclass(frozen=True, slots=True)
class CalledSource:
    """A source in which DeepSpeed may be called."""

    label: str  # how messages call the file
    tree: ast.AST  # the whole file, or the part that is meant
    has_config_flag: bool = False  # whether its command line has `--deepspeed_config`


def check_two_configs(
    source: CalledSource, hyperparameters: Mapping[str, Any], findings: Diagnostics
) -> None:
    """Report ``deepspeed.initialize`` with a config and arguments that hold another."""
    # DeepSpeed 0.19.8 __init__.py:529, an assertion; before 0.6 it took `config` and ignored the other.
    holders = _attribute_holders(source, hyperparameters)
    for call in _calls(source.tree, "initialize"):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        args = given.get("args", call.args[0] if call.args else None)
        config = next((key for key in _CONFIG_KEYWORDS if key in given), None)
        if args is None or config is None or _dotted_name(args) not in holders:
            continue
        findings.problems.append(
            ConfigProblem(
                f"{source.label}:{call.lineno}: deepspeed.initialize()",
                f"given args whose deepspeed_config is set, beside {config}",
                "one config: DeepSpeed 0.19 raises AssertionError for two",
                "Leave args out of the call.",
            )
        )


def check_second_engines(source: CalledSource, findings: Diagnostics) -> None:
    """Warn if one engine's ``backward`` gets a loss that went through another engine."""
    # Only in ZeRO stage 0, where DeepSpeed 0.19.8 refuses it (runtime/engine.py:3129).
    for owner in _classes(source.tree):
        engines = _engines(owner)
        for function in owner.body:
            if isinstance(function, ast.FunctionDef) and len(engines) > 1:
                _check_function(function, engines, source.label, findings)


def check_batch_norm(source: CalledSource, findings: Diagnostics) -> None:
    """Warn of batch normalisation in fp16 on CPU ranks."""
    # DeepSpeed 0.19.8 with torch 2.13, ZeRO 0 to 2: "expected scalar type Half but found Float".
    for node in ast.walk(source.tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(name, str) and name.startswith("BatchNorm"):
            findings.warnings.append(
                f"{source.label}:{getattr(node, 'lineno', 1)}: {name} fails in fp16 on CPU ranks. Train in bf16 or fp32 there."
            )
            return


def check_overruled_sections(source: CalledSource, config: Mapping[str, Any], findings: Diagnostics) -> None:
    """Warn of config sections that the only ``deepspeed.initialize`` overrules."""
    calls = list(itertools.islice(_calls(source.tree, "initialize"), 2))
    given = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    for argument, section in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        value = given.get(argument, ast.Constant(None))
        is_none = isinstance(value, ast.Constant) and value.value is None
        if len(calls) == 1 and config.get(section) and not is_none:
            findings.warnings.append(
                f"{source.label}:{calls[0].lineno}: deepspeed.initialize({argument}=…) takes the place of the {section} section "
                f"of the DeepSpeed config, which is not used. Remove the section, or leave {argument} out of the call."
            )


def _check_function(function: ast.FunctionDef, engines: set[str], label: str, findings: Diagnostics) -> None:
    assignments = _assignments(function)
    for call in itertools.islice(_calls(function, "backward"), _MAX_CALLS):
        assert isinstance(call.func, ast.Attribute)
        own = _dotted_name(call.func.value)
        if own is None or own not in engines or not call.args:
            continue
        for other in sorted(_engines_behind(call.args[0], call.lineno, assignments, engines) - {own}):
            findings.warnings.append(
                f"{label}:{call.lineno}: {own}.backward() goes through {other}, for which DeepSpeed 0.19 raises "
                f'"Direct calls to tensor.backward() are not supported" in ZeRO stage 0. Compute that loss with '
                f"{other}.module(...) between {other}.module.requires_grad_(False) and {other}.module.requires_grad_(True)."
            )


def _engines_behind(loss: ast.AST, line: int, assignments: Assignments, engines: set[str]) -> set[str]:
    """Return the engines that a loss's gradient flows through."""
    # The value of a name is its last assignment above the use.
    found: set[str] = set()
    waiting: list[tuple[ast.AST, int]] = [(loss, line)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        node, before = waiting.pop()
        if (id(node), before) in seen:
            continue
        seen.add((id(node), before))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _STOPS_GRADIENTS:
                if node.func.attr == "module":
                    waiting += [(argument, before) for argument in node.args]
                continue
            called = _dotted_name(node.func)
            if called in engines:
                found.add(str(called))
        name = _dotted_name(node)
        lines, values = assignments.get(name, ([], [])) if name is not None else ([], [])
        position = bisect.bisect_left(lines, before) - 1
        if position >= 0:
            waiting.append((values[position], lines[position]))
        else:
            waiting += [(child, before) for child in ast.iter_child_nodes(node)]
    return found


def _assignments(function: ast.FunctionDef) -> Assignments:
    """Return what is assigned to each name; a constant where gradients are off."""
    without = {
        id(inner)
        for node in ast.walk(function)
        if isinstance(node, ast.With) and any(_is_no_grad(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    }
    found: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in ast.walk(function):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
            continue
        value: ast.expr = ast.Constant(None) if id(node) in without else node.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                name = _dotted_name(one)
                if name is not None:
                    found.setdefault(name, []).append((node.lineno, value))
    ordered = {name: sorted(ones, key=lambda one: one[0]) for name, ones in found.items()}
    return {
        name: ([line for line, _ in ones], [value for _, value in ones]) for name, ones in ordered.items()
    }


def _is_no_grad(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _called_name(node) in ("no_grad", "inference_mode")


def _dotted_name(node: ast.AST) -> str | None:
    """Return ``self.generator`` of a name or its attribute; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < _MAX_NAME_PARTS:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _engines(owner: ast.ClassDef) -> set[str]:
    """Return the attributes set by ``wrap_model_engine`` or ``initialize``."""
    found: set[str] = set()
    for node in ast.walk(owner):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        name = _called_name(node.value)
        target = node.targets[0]
        if name == "initialize" and isinstance(target, ast.Tuple) and target.elts:
            target = target.elts[0]
        elif name != "wrap_model_engine":
            continue
        engine = _dotted_name(target)
        if engine is not None and "." in engine:
            found.add(engine)
    return found


def _attribute_holders(source: CalledSource, hyperparameters: Mapping[str, Any]) -> set[str]:
    """Return the names that hold an object with a ``deepspeed_config`` that is set."""
    # A dict has no attributes, so that hyperparameters count only where something is made of them: AttrDict(…).
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        inner = [call for call in ast.walk(node.value) if call is not node.value]
        is_made_of_hparams = hyperparameters.get("deepspeed_config") is not None and any(
            isinstance(call, ast.Call) and _called_name(call) == "get_hparams" for call in inner
        )
        is_parsed = source.has_config_flag and _called_name(node.value) == "parse_args"
        if (is_made_of_hparams and _called_name(node.value) not in ("dict", "deepcopy")) or is_parsed:
            found.update(name for target in node.targets if (name := _dotted_name(target)) is not None)
    return found


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called_name(node) == name:
            is_method = isinstance(node.func, ast.Attribute)
            if name == "initialize" and is_method and _dotted_name(node.func) != "deepspeed.initialize":
                continue
            if name == "backward" and not is_method:
                continue
            yield node


def _called_name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
