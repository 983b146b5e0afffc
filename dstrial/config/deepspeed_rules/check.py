"""Check a whole DeepSpeed config and explain the origin of each effective value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.config.auto_values import AutoValues
from dstrial.config.batch import AUTO, BATCH_KEYS, BatchSolution, solve_batch
from dstrial.config.deepspeed_rules.conflicts import check_pairs
from dstrial.config.deepspeed_rules.ignored import check_ignored
from dstrial.config.deepspeed_rules.optimizer import check_optimizer_and_scheduler
from dstrial.config.deepspeed_rules.settings import Settings, deepspeed_rules, installed_deepspeed_version
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, KeyPath, Lines, dotted, locate, render
from dstrial.config.dotted_keys import leaves, value_at
from dstrial.config.keys import Dialect, check_keys
from dstrial.config.parallel_dims import ParallelDims, batch_replicas
from dstrial.errors import ConfigError, ConfigProblem

_AUTO_HINT = (
    f' "{AUTO}" is filled in only for an entrypoint whose script, or a module beside it that it imports, shows Hugging Face\'s '
    "Trainer or Accelerate's Accelerator."
)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """The problems of a DeepSpeed config, and the values that DeepSpeed would use."""

    problems: tuple[ConfigProblem, ...]  # errors: training is refused
    warnings: tuple[str, ...]  # whole sentences, mostly about settings without effect
    # Every key that DeepSpeed reads, with its given, computed or default value; for an illegal value the default.
    effective: dict[str, Any]
    batch: BatchSolution | None  # None if the batch equation has no solution, or if the script sets the sizes
    # Dotted key with the value `"auto"` -> sentence that names the library which replaces the value.
    filled: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def check_deepspeed(
    config: Mapping[str, Any],
    sizes: ParallelDims,
    where: str = "deepspeed config",
    lines: Lines | None = None,
    *,
    auto: Literal["error", "warning"] = "error",
    filler: AutoValues | None = None,
    installed: str | None = None,
) -> CheckResult:
    """Check a DeepSpeed config by the committed rules of one DeepSpeed release.

    If another release is installed, the result has a warning, and unknown keys are warnings instead of problems.

    Args:
        config: the DeepSpeed config with overwrites applied.
        sizes: parallel dimensions of the job.
        where: label of keys without a line, such as "deepspeed config of engine 0".
        lines: ``file:line`` of each key.
        auto: how to report ``"auto"`` outside the batch sizes: "warning" if another tool may still replace it.
        filler: the script's library that replaces ``"auto"``; if given, argument ``auto`` is ignored.
        installed: DeepSpeed version that will run; by default the installed one, read without importing DeepSpeed.
    """
    findings = Diagnostics(lines or {}, where)
    try:
        checked = _check(config, sizes, findings, auto, filler, installed)
    except ConfigError as error:
        # The check stopped at the maximum number of problems.
        checked = CheckResult(error.problems, (), {}, None)
    return dataclasses.replace(checked, warnings=tuple(dict.fromkeys(findings.warnings)))


def _check(
    config: Mapping[str, Any],
    sizes: ParallelDims,
    findings: Diagnostics,
    auto: Literal["error", "warning"],
    filler: AutoValues | None,
    installed: str | None,
) -> CheckResult:
    rules = deepspeed_rules()
    installed = installed or installed_deepspeed_version() or rules.version
    is_foreign = installed.split("+")[0] != rules.version
    if is_foreign:
        findings.warn(
            "", f"is checked by the rules of DeepSpeed {rules.version}, but {installed} is installed; "
            "unknown keys are only warned about"
        )  # fmt: skip
    dialect = Dialect(
        name=f"DeepSpeed {rules.version}",
        consequence="DeepSpeed would ignore it silently",
        auto=auto,
        filler=filler,
        unknown_is_warning=is_foreign,
    )
    normalised = _normalise(config, findings)
    batch_given = {key: normalised.pop(key, None) for key in BATCH_KEYS}
    effective = check_keys(rules.root, normalised, dialect, findings)
    if effective["zero_optimization"]["overlap_comm"] is None:
        effective["zero_optimization"]["overlap_comm"] = effective["zero_optimization"]["stage"] == 3
    settings = Settings({**normalised, **batch_given}, effective, sizes, findings)
    batch = _solve(batch_given, settings, filler)
    effective.update({key: getattr(batch, key) if batch else None for key in BATCH_KEYS})
    check_pairs(settings)
    key = "sequence_parallel_size"
    settings.reject(
        filler is not None and (settings.value(key) or 1) > 1,
        key,
        f"1 with {filler.name if filler else ''}, which passes DeepSpeed no sequence-parallel groups",
        "Train in a trial with parallel_state_sp (docs/how-to/parallelism.md).",
    )
    check_optimizer_and_scheduler(settings, rules, dialect)
    check_ignored(settings)
    for key in ("optimizer", "scheduler"):
        if key not in config:
            effective.pop(key, None)
    autos = [dotted(path) for path, value in leaves(config) if value == AUTO]
    filled = {key: f"{filler.name} fills it in" for key in autos if filler and filler.fills_in(key)}
    return CheckResult(tuple(dict.fromkeys(findings.problems)), (), effective, batch, filled=filled)


def _normalise(config: Mapping[str, Any], findings: Diagnostics) -> dict[str, Any]:
    """Return a copy of a config with deprecated keys replaced as in DeepSpeed.

    Some deprecated keys are recorded in ``findings``: an old form as a warning, two conflicting offload keys as a problem.
    """
    normalised = dict(config)
    zero = normalised.get("zero_optimization")
    if isinstance(zero, bool):
        stage = int(zero)
        findings.warn(
            "zero_optimization", f'is {render(zero)}, an old form; write {{"stage": {stage}}} instead'
        )
        zero = {"stage": stage}
        normalised["zero_optimization"] = zero
    if isinstance(zero, Mapping):
        zero = dict(zero)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.get(old) is True and zero.get(new) is not None:
                path = f"zero_optimization.{old}"
                findings.problem(path, f"given together with {new}", f"only {new}", f"Remove {old}.")
            elif zero.get(old) is True:
                zero[new] = {"device": "cpu"}
        normalised["zero_optimization"] = zero
    if "bfloat16" in normalised:
        old_section = normalised.pop("bfloat16")
        if normalised.get("bf16") is None:
            findings.warn("bfloat16", "is an old name; write bf16 instead")
            normalised["bf16"] = old_section
        else:
            findings.warn("bfloat16", "is ignored, because bf16 is given too; remove it")
    return normalised


def _solve(given: Mapping[str, Any], settings: Settings, filler: AutoValues | None) -> BatchSolution | None:
    """Return all batch sizes, or None if they are unknown.

    They are unknown if the script's data loader sets them, or if the batch equation has no solution. The latter is recorded as
    a problem. ``given`` has the batch sizes as in the config; ``filler`` None means that no library replaces ``"auto"``.
    """
    findings, sizes = settings.findings, settings.sizes
    replicas = batch_replicas(settings.effective, sizes)
    where = {key: findings.place(key) for key in BATCH_KEYS}
    solution: BatchSolution | None
    try:
        if filler is not None:
            solution = filler.solve(given, replicas, where)
        else:
            total, micro, steps = (given[key] for key in BATCH_KEYS)
            solution = solve_batch(total, micro, steps, replicas, where=where)
    except ConfigError as error:
        hint = "" if filler is not None or AUTO not in given.values() else _AUTO_HINT
        findings.problems += [
            dataclasses.replace(problem, fix=f"{problem.fix}{hint}") for problem in error.problems
        ]
        return None
    for key in BATCH_KEYS:
        if filler is None and given[key] == AUTO:
            findings.warn(
                key, f'is "auto", solved to {getattr(solution, key)}; DeepSpeed itself needs the number: '
                "take the config from context.get_deepspeed_config()"
            )  # fmt: skip
    return solution


DEFAULT_ORIGIN = "DeepSpeed's default"


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedValue:
    """One DeepSpeed setting, its effective value, and where the value comes from."""

    key: str  # dotted
    value: str  # effective value, as JSON
    # `file:line`, "overwrite_deepspeed_args (file:line)", "solved", "DeepSpeed's default", or the library that sets it.
    origin: str


def explain(source: DeepSpeedSource, checked: CheckResult) -> tuple[ExplainedValue, ...]:
    """Return every setting of a checked config with its value and the value's origin."""
    # Order: batch sizes, given settings, DeepSpeed's defaults.
    effective = checked.effective
    rows = [_row((key,), effective[key], source, checked) for key in BATCH_KEYS]
    others = [
        _row(path, leaf, source, checked)
        for key in sorted(effective)
        if key not in BATCH_KEYS
        for path, leaf in leaves(effective[key], (key,))
    ]
    return (*rows, *sorted(others, key=lambda row: row.origin.startswith(DEFAULT_ORIGIN)))


def _row(path: KeyPath, value: Any, source: DeepSpeedSource, checked: CheckResult) -> ExplainedValue:
    key, place = dotted(path), locate(source.lines, path, source.label)
    given, origin = value_at(source.merged, path), place
    if checked.batch is not None and path[0] in checked.batch.solved:
        origin = "solved"
    elif (says := checked.filled.get(key)) is not None:
        value, origin = AUTO, f"{says} ({place})"
    elif given is None:
        origin = DEFAULT_ORIGIN
    elif given == AUTO:
        origin = f'{DEFAULT_ORIGIN} ("auto" in {place})'
    elif source.is_overwritten(path):
        origin = f"overwrite_deepspeed_args ({place})"
    return ExplainedValue(key, json.dumps(value, ensure_ascii=False), origin)
