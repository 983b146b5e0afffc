"""Compare the command line of Hugging Face's Trainer with the configs. Pure.

Source: transformers 4.56 and 5.24 ``integrations/deepspeed.py``, which rejects arguments that contradict the DeepSpeed config.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, locate, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.experiment_config.entrypoint import ScriptSource
from dstrial.errors import ConfigProblem

_GIVEN_TWICE = {"lr_scheduler_type": "scheduler", "optim": "optimizer"}
_RECONCILES = "get_hf_args_with_overwrites"


def check_trainer_flags(
    script: ScriptSource,
    searcher: Mapping[str, Any],
    deepspeed: tuple[DeepSpeedSource, CheckResult] | None,
    context_dir: Path,
    findings: Diagnostics,
) -> None:
    """Warn of arguments that the Trainer rejects or ignores with these configs.

    ``searcher`` is a section of the experiment config. ``deepspeed`` is the main DeepSpeed config and its check, or None.
    """
    batch = None if deepspeed is None else deepspeed[1].batch
    steps = script.arguments.value("max_steps") or ""
    if steps.isdecimal() and int(steps) and isinstance(searcher["max_length"], (Mapping, int)):
        length = TrainerLength.of(int(steps), 0)
        problems = length_problems(searcher, length, batch.train_batch_size if batch else 1)
        findings.warnings.extend(map(str, problems))
    if deepspeed is not None:
        _check_beside_deepspeed(script, deepspeed[0], context_dir, findings)


def _check_beside_deepspeed(
    script: ScriptSource, source: DeepSpeedSource, context_dir: Path, findings: Diagnostics
) -> None:
    words = script.arguments
    for name, section in _GIVEN_TWICE.items():
        if words.find(name) is not None and source.merged.get(section) is not None:
            place = locate(source.lines, (section,), source.label)
            findings.warn(
                "entrypoint",
                f"has --{name}, which has no effect beside {section} ({place}). Remove one of the two",
            )
    nodes = (node for tree in script.trees for node in ast.walk(tree))
    if any(getattr(node, "id", getattr(node, "attr", None)) == _RECONCILES for node in nodes):
        return
    for name in ("fp16", "bf16"):
        in_json, flag = value_at(source.merged, f"{name}.enabled"), words.truth(name)
        if isinstance(in_json, bool) and flag is not None and flag != in_json:
            place = locate(source.lines, (name, "enabled"), source.label)
            findings.warn(
                "entrypoint",
                f"has --{name} {flag}, but {name}.enabled is {render(in_json)} ({place}): the Trainer refuses the two. "
                'Change one of them, or write "auto" in the DeepSpeed config',
            )
    named = words.value("deepspeed")
    if named and source.path and (context_dir / named).resolve() != source.path.resolve():
        findings.warn(
            "entrypoint",
            f"has --deepspeed {named}, but hyperparameters.deepspeed_config is {source.label}, which is the one checked here. "
            f"Name the same file, or pass the arguments through dstrial.dsat.{_RECONCILES}",
        )


_UNITS = ("batches", "epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerLength:
    """The length of training that the Trainer's arguments set."""

    value: float
    unit: str  # `batches` or `epochs`
    argument: str  # the command-line argument that sets it

    @classmethod
    def of(cls, max_steps: int, num_train_epochs: float) -> TrainerLength:
        """Return the length: ``max_steps`` if above 0, otherwise ``num_train_epochs``."""
        if max_steps > 0:
            return cls(max_steps, "batches", "--max_steps")
        return cls(num_train_epochs, "epochs", "--num_train_epochs")

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def length_problems(
    searcher: Mapping[str, Any], length: TrainerLength, train_batch_size: int
) -> list[ConfigProblem]:
    """Return contradictions between the searcher's and the Trainer's length.

    A ``max_time`` in another unit than batches or epochs is ignored. ``train_batch_size`` (over all ranks) converts records.
    """
    problems = []
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping) and len(max_length) == 1:
        unit, value = next(iter(max_length.items()))
        if unit == "records":
            unit, value = "batches", max(int(value) // train_batch_size, 1)
        problems += _problem("searcher.max_length", f"{dict(max_length)}", str(unit), value, length)
    elif max_length is not None:
        unit = str(searcher.get("unit") or "batches")
        problems += _problem("searcher.max_length", f"{max_length}", unit, max_length, length)
    max_time, time_metric = searcher.get("max_time"), searcher.get("time_metric")
    if max_time is not None and time_metric in _UNITS:
        got = f"{max_time} with searcher.time_metric {time_metric}"
        problems += _problem("searcher.max_time", got, str(time_metric), max_time, length)
    return problems


def _problem(where: str, got: str, unit: str, value: Any, length: TrainerLength) -> list[ConfigProblem]:
    if unit == length.unit and float(value) == float(length.value):
        return []
    flag = {"batches": "--max_steps", "epochs": "--num_train_epochs"}.get(unit, length.argument)
    clear = " and leave --max_steps out" if unit == "epochs" and length.unit == "batches" else ""
    return [
        ConfigProblem(
            where,
            got,
            f"the length of the Trainer, {length} ({length.argument})",
            f"Pass {flag} {value}{clear}, or change {where}.",
        )
    ]
