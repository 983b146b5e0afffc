"""What DeepSpeed 0.19 refuses in old code, as far as its source shows it. Pure.

It reads the calls and the last assignments of their arguments, and imports nothing. What it cannot see is found at run time,
with the same words from ``dstrial/engine/deepspeed_internals/engines.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics
from dstrial.errors import ConfigProblem

_CONFIG_KEYWORDS = ("config", "config_params")
_MAX_NAME_PARTS = 8  # a master reads sources of others


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
    for call in _calls(source.tree):
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


def check_overruled_sections(source: CalledSource, config: Mapping[str, Any], findings: Diagnostics) -> None:
    """Warn of config sections that the only ``deepspeed.initialize`` overrules."""
    calls = list(itertools.islice(_calls(source.tree), 2))
    given = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    for argument, section in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        value = given.get(argument, ast.Constant(None))
        is_none = isinstance(value, ast.Constant) and value.value is None
        if len(calls) == 1 and config.get(section) and not is_none:
            findings.warnings.append(
                f"{source.label}:{calls[0].lineno}: deepspeed.initialize({argument}=…) takes the place of the {section} section "
                f"of the DeepSpeed config, which is not used. Remove the section, or leave {argument} out of the call."
            )


def _dotted_name(node: ast.AST) -> str | None:
    """Return ``self.generator`` of a name or its attribute; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < _MAX_NAME_PARTS:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


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


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted_name(node.func) in ("initialize", "deepspeed.initialize"):
            yield node


def _called_name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
