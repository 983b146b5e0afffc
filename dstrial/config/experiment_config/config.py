"""Load the experiment config: parse it, check it and fill in defaults.

``experiment_seed`` defaults to 0 (in Determined to the time), and ``name`` to the file's stem. Thus repeating a command
reproduces the earlier run, and finds that run by its name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dstrial.config.auto_values import AutoValues
from dstrial.config.batch import BATCH_KEYS, solve_batch
from dstrial.config.deepspeed_rules.check import CheckResult, check_deepspeed
from dstrial.config.deepspeed_source import MAIN_KEY, DeepSpeedSource, other_configs, read_deepspeed
from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.documents import Document, read_yaml
from dstrial.config.dotted_keys import apply_overrides, check_dotted_names, count_in, dstrial_section
from dstrial.config.experiment_config.dstrial_section import (
    HOOK_NAME,
    check_requirements,
    check_slots,
    requirements_of,
)
from dstrial.config.experiment_config.entrypoint import TrialSource, check_entrypoint
from dstrial.config.experiment_config.environment import check_environment
from dstrial.config.experiment_config.hyperparameters import concrete_values, normalised_specs
from dstrial.config.experiment_config.loggers import check_loggers
from dstrial.config.experiment_config.storage import check_storage
from dstrial.config.keys import check_keys
from dstrial.config.parallel_dims import (
    DIM_KEYS,
    SECTION_KEYS,
    ParallelDims,
    autotp_clash,
    config_sizes,
)
from dstrial.config.schema import (
    DEFAULT_PREEMPTION_TIMEOUT_S,
    DIALECT,
    ENDED_SEARCHERS,
    EXPERIMENT,
    SEARCHER_COMMON,
    SEARCHERS,
)
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.metadata import SavedRun
from dstrial.resume.plan import check_resumption, with_kept_batch

_MAX_ENTRYPOINT_CHARS = 2**16
_MAX_OTHER_ENGINES = 20  # each costs a check of a DeepSpeed config


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """A checked experiment config and its DeepSpeed configs; must not be changed."""

    path: Path
    context_dir: Path  # directory of the model definition; the config's paths are relative to it
    name: str
    entrypoint: str | list[str] | None
    hyperparameters: dict[str, Any]  # concrete values as the trial gets them, with nested mappings
    raw: dict[
        str, Any
    ]  # the whole config with defaults; missing `save_…` keys of `checkpoint_storage` are None
    metric: str  # validation metric that decides which checkpoint is best
    smaller_is_better: bool
    slots_per_trial: int  # ranks of a trial, one per device; 0 for one rank on the CPU
    environment_variables: dict[str, str]  # for the kind of device of this machine
    preemption_timeout_s: int  # grace period of ranks to save and exit after a stop request
    max_restarts: int
    warnings: tuple[str, ...]  # whole sentences with `file:line`
    notes: tuple[str, ...]  # whole sentences: assumptions of the check, and parts that it could not check
    # Name of a hyperparameter with a DeepSpeed config -> the config and its check for `sizes`; `deepspeed_config` is first.
    engines: dict[str, tuple[DeepSpeedSource, CheckResult]]
    sizes: ParallelDims  # for which the DeepSpeed configs are checked

    @property
    def deepspeed(self) -> DeepSpeedSource | None:
        """The DeepSpeed config of the main engine; None if it is not given."""
        return self.engines[MAIN_KEY][0] if MAIN_KEY in self.engines else None

    @property
    def deepspeed_check(self) -> CheckResult | None:
        """The check of the main engine's DeepSpeed config; None if it is not given."""
        return self.engines[MAIN_KEY][1] if MAIN_KEY in self.engines else None

    def require_max_length(self) -> None:
        """Raise ConfigError if the searcher does not give the length of training."""
        searcher = self.raw["searcher"]
        has_time = searcher["max_time"] is not None and searcher["time_metric"] in ("batches", "epochs")
        if searcher["max_length"] is not None or has_time:
            return
        problem = ConfigProblem(
            f"{self.path}: searcher.max_length",
            "not given, and searcher.max_time with time_metric batches or epochs is not either",
            "how long to train",
            "Add max_length: {batches: 1000} to the searcher, or max_time: 1000 with time_metric: batches.",
        )
        raise ConfigError([problem])


def load_experiment(
    path: str | Path,
    context_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    require_concrete: bool = True,
    require_entrypoint: bool = False,
    slots: int | None = None,
    resumed: SavedRun | None = None,
) -> ExperimentConfig:
    """Read and check an experiment config and its DeepSpeed configs.

    Args:
        path: the experiment's YAML file.
        context_dir: directory of the model definition (the user's code).
        overrides: texts ``key=value`` as from ``--config``; see :mod:`dstrial.config.dotted_keys`.
        require_concrete: whether a search space as hyperparameter is an error (true) or a warning (false).
        require_entrypoint: whether a missing ``entrypoint`` is an error.
        slots: number of slots to check for, instead of ``resources.slots_per_trial``.
        resumed: the checkpoint to resume from; the check reports what prevents resuming. None for a new run.

    Raises:
        ConfigError: a file is wrong; the error has all problems of all files.
    """
    path = Path(path)
    return check_experiment(
        apply_overrides(read_yaml(path, str(path)), overrides),
        path,
        Path(context_dir),
        require_concrete=require_concrete,
        require_entrypoint=require_entrypoint,
        slots=slots,
        resumed=resumed,
    )


def experiment_name(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return an experiment's name, by default the file's stem.

    Only the key ``name`` of the config is checked.
    """
    path = Path(path)
    given = apply_overrides(read_yaml(path, str(path)), overrides).value
    name = given.get("name") if isinstance(given, Mapping) else None
    return str(name or path.stem)


def check_experiment(
    document: Document,
    path: Path,
    context_dir: Path,
    *,
    require_concrete: bool = True,
    require_entrypoint: bool = False,
    slots: int | None = None,
    resumed: SavedRun | None = None,
    has_files: bool = True,
    more_checks: Callable[[dict[str, Any], Diagnostics], None] | None = None,
) -> ExperimentConfig:
    """Check a parsed experiment config, as :func:`load_experiment` does.

    ``path`` names the config in messages. If ``has_files`` is false, the entrypoint's module or script need not exist.
    ``more_checks`` is called with the config, including defaults, and the ``Diagnostics`` in which to record problems.
    """
    findings = Diagnostics(document.lines, document.label)
    given = _mapping_of(document, context_dir, findings)
    raw = check_keys(EXPERIMENT, given, DIALECT, findings)
    _check_sections(raw, given, findings)
    source = _check_entrypoint(raw, given, context_dir if has_files else None, findings, require_entrypoint)
    hyperparameters = _check_hyperparameters(raw, findings, require_concrete=require_concrete)
    variables = check_environment(raw, findings)
    if more_checks is not None:
        more_checks(raw, findings)
    check_requirements(raw, context_dir, findings)
    # A master checks loggers itself, because its trials may install packages or run another interpreter.
    installs_itself = requirements_of(raw) is not None or (context_dir / HOOK_NAME).is_file()
    check_loggers(raw, findings, installs_itself=installs_itself or more_checks is not None)
    raw["name"] = raw["name"] or path.stem
    slots_per_trial = raw["resources"]["slots_per_trial"] if slots is None else slots
    slots_key = "resources.slots_per_trial" if slots is None else "--slots"
    resumed = resumed if resumed is not None and resumed.engines else None
    engines = _read_engines(hyperparameters, document, path, context_dir, findings)
    merged = engines[MAIN_KEY].merged if MAIN_KEY in engines else None
    stages = None
    if source.mentions_pipeline:
        stages = _assumed_stages(hyperparameters, merged or {}, max(slots_per_trial, 1))
    sizes = _sizes(raw, merged, slots_per_trial, slots_key, stages, resumed, findings)
    checks = {
        key: (found, _check_engine(key, found, source, sizes, resumed, findings))
        for key, found in engines.items()
    }
    if resumed is not None:
        check_resumption(raw, resumed, slots_per_trial, slots_key, [*checks.values()], findings)
    findings.raise_if_any()
    return ExperimentConfig(
        path=path,
        context_dir=context_dir,
        name=raw["name"],
        entrypoint=raw["entrypoint"],
        hyperparameters=hyperparameters,
        raw=raw,
        metric=raw["searcher"]["metric"],
        smaller_is_better=raw["searcher"]["smaller_is_better"],
        slots_per_trial=slots_per_trial,
        environment_variables=variables[_device_kind()],
        preemption_timeout_s=raw["preemption_timeout"] or DEFAULT_PREEMPTION_TIMEOUT_S,
        max_restarts=raw["max_restarts"],
        warnings=tuple(dict.fromkeys(findings.warnings)),
        notes=tuple(dict.fromkeys(findings.notes)),
        engines=checks,
        sizes=sizes,
    )


def _mapping_of(document: Document, context_dir: Path, findings: Diagnostics) -> Mapping[str, Any]:
    """Return the config as the user wrote it; raise ConfigError if it is no mapping."""
    if not context_dir.is_dir():
        fix = "Pass the directory that holds the model definition."
        findings.problems.append(ConfigProblem("CONTEXT_DIR", str(context_dir), "an existing directory", fix))
    if not isinstance(document.value, Mapping):
        fix = "Start with name:, entrypoint: and searcher:."
        findings.problem((), render(document.value), "a mapping with the fields of an experiment config", fix)
        findings.raise_if_any()
    given: Mapping[str, Any] = document.value
    return given


def _check_hyperparameters(
    raw: dict[str, Any], findings: Diagnostics, *, require_concrete: bool
) -> dict[str, Any]:
    hyperparameters = concrete_values(
        raw["hyperparameters"],
        findings,
        require_concrete=require_concrete,
        needs_counts=raw["searcher"]["name"] == "grid",
    )
    check_dotted_names(hyperparameters, findings)
    raw["hyperparameters"] = normalised_specs(raw["hyperparameters"])
    return hyperparameters


def _read_engines(
    hyperparameters: Mapping[str, Any],
    document: Document,
    path: Path,
    context_dir: Path,
    findings: Diagnostics,
) -> dict[str, DeepSpeedSource]:
    """Return the DeepSpeed config of each engine, the main engine first.

    Keys are names of hyperparameters. Configs that cannot be read are left out; their problems are recorded.
    """
    if MAIN_KEY not in hyperparameters:
        findings.notes.append(
            f"{path}: hyperparameters.deepspeed_config is not given, so the DeepSpeed config is checked only when "
            "the trial wraps its engine"
        )
    others = other_configs(hyperparameters)
    if len(others) > _MAX_OTHER_ENGINES:
        got = f"a mapping with {len(others)} keys that end in {MAIN_KEY}"
        findings.problem("hyperparameters", got, f"at most {_MAX_OTHER_ENGINES} engines", "Remove some.")
        others = ()
    found = {
        key: read_deepspeed(key, hyperparameters, context_dir, document.lines, str(path), findings)
        for key in (MAIN_KEY, *others)
    }
    return {key: source for key, source in found.items() if source is not None}


def _check_engine(
    key: str,
    found: DeepSpeedSource,
    source: TrialSource,
    sizes: ParallelDims,
    resumed: SavedRun | None,
    findings: Diagnostics,
) -> CheckResult:
    merged = found.merged
    if resumed is not None and resumed.keeps_batch:
        merged = with_kept_batch(found, resumed, sizes, findings.notes, is_main=key == MAIN_KEY)
    checked = check_deepspeed(
        merged,
        sizes,
        found.label,
        found.lines,
        auto="error" if source.trial else "warning",
        filler=AutoValues.of(source.script),
    )
    findings.problems.extend(checked.problems)
    findings.warnings.extend(checked.warnings)
    return checked


def _check_sections(raw: dict[str, Any], given: Mapping[str, Any], findings: Diagnostics) -> None:
    searcher = given.get("searcher")
    check_searcher(raw, searcher if isinstance(searcher, Mapping) else {}, findings)
    check_storage(raw, given.get("checkpoint_storage"), findings)
    check_slots(dstrial_section(raw), raw["resources"]["slots_per_trial"], findings)
    if raw["resources"]["slots"] is None:
        del raw["resources"]["slots"]  # a key of commands, which Determined accepts here too


def check_searcher(raw: dict[str, Any], given: Mapping[str, Any], findings: Diagnostics) -> None:
    """Check the ``searcher`` section; delete fields of other searchers from ``raw``.

    ``raw`` is the whole config with defaults; ``given`` is the ``searcher`` section as the user wrote it.
    """
    searcher = raw["searcher"]
    if not given:
        fix = "Add searcher: {name: single, metric: validation_loss, max_length: {batches: 1000}}."
        findings.problem("searcher", "not given", "a mapping with name and metric", fix)
        return
    name = searcher["name"]

    def require(key: str, expected: str, fix: str) -> None:
        # An invalid value is None in `searcher`; its problem is already recorded.
        if searcher[key] is None and given.get(key) is None:
            findings.problem(f"searcher.{key}", "not given", expected, fix)

    require("name", f"one of {', '.join(SEARCHERS)}", "Add name: single.")
    require(
        "metric",
        "the name of a validation metric",
        "Name the validation metric that says which checkpoint is best.",
    )
    if name in ENDED_SEARCHERS:
        got, fix = (
            f"{render(name)}, which Determined has ended",
            "Set it to adaptive_asha, or to single for one trial.",
        )
        findings.problem("searcher.name", got, "a searcher that exists", fix)
    elif name in SEARCHERS:
        for key in SEARCHERS[name].requires:
            require(key, f"an integer of at least 1 for {name}", f"Add {key}.")
        both = "max_time and time_metric together"
        if SEARCHERS[name].is_timed:
            both = f"max_time and time_metric: the `{name}` searcher requires `max_time` and `time_metric` to be set"
        if SEARCHERS[name].is_timed or searcher["time_metric"] is not None:
            require("max_time", both, "Add max_time: 1000, for example.")
        if SEARCHERS[name].is_timed or searcher["max_time"] is not None:
            require("time_metric", both, "Add time_metric: batches, for example.")
        allowed = (*SEARCHER_COMMON, *SEARCHERS[name].keys)
        for key in given:
            if key in searcher and key not in allowed:
                findings.warn(f"searcher.{key}", f"has no effect with searcher {name}")
        raw["searcher"] = {key: value for key, value in searcher.items() if key in allowed}
    elif name is not None:
        close = difflib.get_close_matches(name, SEARCHERS, n=1) or ["single"]
        fix = f"Set it to {'async_halving' if name == 'asha' else close[0]}."
        findings.problem("searcher.name", render(name), f"one of {', '.join(SEARCHERS)}", fix)
    if searcher["source_trial_id"] is not None and searcher["source_checkpoint_uuid"] is not None:
        got, fix = "given with source_trial_id", "Keep one of the two."
        findings.problem("searcher.source_checkpoint_uuid", got, "one of the two", fix)


def _check_entrypoint(
    raw: Mapping[str, Any],
    given: Mapping[str, Any],
    context_dir: Path | None,
    findings: Diagnostics,
    is_required: bool,
) -> TrialSource:
    """Check the entrypoint; return facts from its source files.

    If ``context_dir`` is None, no files are read.
    """
    entrypoint, expected = raw["entrypoint"], "module:Class, or a command"
    if entrypoint is None:
        if is_required and given.get("entrypoint") is None:
            fix = "Add entrypoint: model_def:MyTrial for class MyTrial in model_def.py."
            findings.problem("entrypoint", "not given", expected, fix)
        return TrialSource(None)
    words = [entrypoint] if isinstance(entrypoint, str) else [str(word) for word in entrypoint]
    num_chars = sum(map(len, words))
    if num_chars > _MAX_ENTRYPOINT_CHARS:
        # The system rejects longer arguments, and splitting a text takes quadratic time.
        got, expected = f"{num_chars} characters long", f"at most {_MAX_ENTRYPOINT_CHARS} characters"
        findings.problem("entrypoint", got, expected, "Put it into a script of the model definition.")
    elif not "".join(words[:1]).strip():
        fix = "Name what is to run, for example model_def:MyTrial."
        findings.problem("entrypoint", render(entrypoint), expected, fix)
    elif context_dir is not None and context_dir.is_dir():
        return check_entrypoint(entrypoint, context_dir, findings)
    return TrialSource(None)


def _sizes(
    raw: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    slots: int,
    slots_key: str,
    stages: int | None,
    resumed: SavedRun | None,
    findings: Diagnostics,
) -> ParallelDims:
    """Return the job's parallel dimensions; by default each rank is a replica.

    Each dimension is read from the configs, else from the checkpoint ``resumed``, else from the trial's source. ``raw`` is the
    experiment config with defaults, ``config`` the main DeepSpeed config. ``slots`` is the trial's number of slots, and
    ``slots_key`` the config key or flag that sets it. ``stages`` is the number of pipeline stages to assume; None if the source
    has no pipeline. A number of slots that cannot be divided into replicas is recorded as a problem.
    """
    section = dstrial_section(raw)
    if clash := autotp_clash(count_in(section, "model_parallel_size"), config):
        findings.problem("data.dstrial.model_parallel_size", *clash)
    given = {key: count_in(section, key) for key in SECTION_KEYS}
    if stages is None and given["pipeline_stages"] is None:  # with a pipeline they are not used
        given |= config_sizes(config)
    chosen = {field: given.get(key) for key, field in DIM_KEYS.items()}
    world_size = max(slots, 1)
    is_resumed = resumed is not None and resumed.keeps_batch
    if resumed is not None and is_resumed:
        saved = resumed.engines[0].replica_with({}, config)
        for field, number in chosen.items():
            if number is None and (field != "pp" or saved.is_pipeline):
                chosen[field] = getattr(saved, field)
    if not any(chosen.values()) and world_size > 1:
        chosen["pp"] = stages
        if stages is not None:
            findings.notes.append(
                f"data.dstrial.pipeline_stages is not given: assumed {stages}. Set it, because a "
                "run solves the batch sizes by this key"
            )
    sizes = {field: number or 1 for field, number in chosen.items()}
    replica = ParallelDims.of_replica(**sizes, is_pipeline=chosen["pp"] is not None)
    per_replica = replica.ranks_per_replica
    if world_size % per_replica == 0:
        return replica.on(world_size)
    of_section = math.prod(count_in(section, key) or 1 for key in SECTION_KEYS)
    if is_resumed or world_size % of_section == 0:
        # The resume check or the check of the DeepSpeed config reports this error.
        return ParallelDims(world_size, is_pipeline=replica.is_pipeline)
    below = world_size // per_replica * per_replica
    choices = " or ".join(str(n) for n in (below, below + per_replica) if n)
    findings.problems.append(
        ConfigProblem(
            slots_key if slots_key == "--slots" else findings.place(slots_key),
            str(slots),
            f"a multiple of {per_replica}, the ranks of one replica ({' x '.join(SECTION_KEYS)})",
            f"Use {choices} slots.",
        )
    )
    return replica


def _assumed_stages(hyperparameters: Mapping[str, Any], config: Mapping[str, Any], world_size: int) -> int:
    """Return the number of pipeline stages to assume if the config does not set it.

    This is the value of a hyperparameter such as ``num_stages``. Without one, it is the lowest number for which the batch
    equation has a solution, else 1.
    """
    for name in ("pipeline_stages", "num_stages", "pipe_parallel_size"):
        if type(stages := hyperparameters.get(name)) is int and stages > 0:
            return stages
    total, micro, steps = (config.get(key) for key in BATCH_KEYS)
    for stages in range(1, world_size + 1):
        if world_size % stages == 0:
            try:
                solve_batch(total, micro, steps, world_size // stages)
            except ConfigError:
                continue
            return stages
    return 1


def _device_kind() -> Literal["cpu", "cuda", "rocm"]:
    chosen = os.environ.get("DS_ACCELERATOR", "")
    if chosen == "cpu":
        return "cpu"
    if chosen == "cuda" or Path("/dev/nvidiactl").exists():
        return "cuda"
    return "rocm" if Path("/dev/kfd").exists() else "cpu"
