"""Read and check the options, experiment config and search space of a search."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.config.auto_values import DEFAULT_MICRO_BATCH, SIZE_FLAGS, AutoValues
from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.documents import parse_yaml_value, read_yaml
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.experiment_config.entrypoint import find_script, trial_spec
from dstrial.config.parallel_dims import batch_replicas
from dstrial.dsat.cli import SearchFlags
from dstrial.dsat.core.candidate import HYPERPARAMETERS
from dstrial.dsat.methods.base import MethodOptions
from dstrial.dsat.space import ZERO, Space
from dstrial.errors import ConfigError, ConfigProblem

_CHOSEN_BY_DSAT = {
    "train_batch_size": "Pass --train-batch-size for another global batch, or --free-batch to let it change.",
    "train_micro_batch_size_per_gpu": "Remove it: every micro batch that divides the global batch is tried anyway.",
    "gradient_accumulation_steps": "Remove it: it follows from the global batch and the micro batch.",
    f"{ZERO}.stage": "Pass --zero-stages, with the stages to try.",
}
"""Path that ``--space`` and ``--tune`` must not name -> what to do instead."""
_TOTAL, _MICRO, _ = BATCH_KEYS


@dataclasses.dataclass(frozen=True, slots=True)
class SearchConfig:
    """The checked settings of a search: options, experiment and search space."""

    method: str
    flags: SearchFlags
    experiment: ExperimentConfig
    written: dict[str, Any]  # the experiment config as the user has written it
    space: Space
    options: MethodOptions
    output: Path  # absolute directory of the search; ``--fresh`` may take another one beside it
    fingerprint: str  # hash of everything that decides what is measured; a resuming command has the same
    warnings: tuple[str, ...]

    @property
    def context_dir(self) -> Path:
        return self.experiment.context_dir

    @property
    def trial(self) -> str | None:
        """``module:Class`` of the trial that the entrypoint names; None for a script."""
        return trial_spec(self.experiment.entrypoint)

    @property
    def num_slots(self) -> int:
        """Number of ranks of every trial, at least 1."""
        return max(self.experiment.slots_per_trial, 1)


def read_config(flags: SearchFlags) -> SearchConfig:
    """Read and check the files that the options name.

    Raises:
        ConfigError: lists all problems that were found.
    """
    problems = list(_flag_problems(flags))
    path = Path(flags.config_path)
    extra: dict[str, tuple[Any, ...]] = {}
    space: Space | None = None
    warnings: list[str] = []
    try:
        experiment = load_experiment(path, Path(flags.model_dir), _overrides(flags), require_entrypoint=True)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    problems += _experiment_problems(flags, experiment)
    try:
        extra = read_space(flags, experiment.hyperparameters)
        if experiment.deepspeed is not None:
            base, assumed = with_batch_sizes(experiment)
            space = Space(
                base,
                experiment.sizes,
                stages=tuple(flags.zero_stages),
                train_batch_size=flags.train_batch_size,
                free_batch=flags.free_batch,
                extra=extra,
                hyperparameters=experiment.hyperparameters,
            )
            refused, doubtful = _space_value_problems(flags, space)
            problems += refused
            warnings = [*assumed, *_flag_warnings(flags), *doubtful]
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    assert space is not None  # else a problem says that there is no DeepSpeed config
    known = {field.name for field in dataclasses.fields(MethodOptions)}
    return SearchConfig(
        method=flags.search_method,
        flags=flags,
        experiment=experiment,
        written=copy.deepcopy(read_yaml(path, str(path)).value),
        space=space,
        options=MethodOptions(
            **{name: value for name, value in dataclasses.asdict(flags).items() if name in known}
        ),
        output=Path(flags.output or f"dsat/{_slug(experiment.name)}-{flags.search_method}").absolute(),
        fingerprint=_fingerprint(flags, experiment, extra),
        warnings=(*experiment.warnings, *warnings),
    )


def with_parallel(settings: SearchConfig, num_parallel: int) -> SearchConfig:
    return dataclasses.replace(
        settings, options=dataclasses.replace(settings.options, num_parallel=num_parallel)
    )


def _overrides(flags: SearchFlags) -> list[str]:
    above = "hyperparameters.overwrite_deepspeed_args"
    found = [] if flags.slots is None else [f"resources.slots_per_trial={flags.slots[0]}"]
    if flags.train_batch_size is not None:
        found += [
            f"{above}.train_batch_size={flags.train_batch_size}",
            f"{above}.gradient_accumulation_steps=null",
        ]
    return found


def _fingerprint(
    flags: SearchFlags, experiment: ExperimentConfig, extra: Mapping[str, tuple[Any, ...]]
) -> str:
    names = {"config_path": experiment.path.name, "model_dir": experiment.context_dir.resolve().name}
    merged = experiment.deepspeed.merged if experiment.deepspeed else None
    known = [{**flags.fingerprinted(), **names}, experiment.raw, merged, dict(extra)]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _slug(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in name)
    return kept.strip("-.")[:80] or "experiment"


# ---- checks ----------------------------------------------------------------------------------


def _flag_problems(flags: SearchFlags) -> Iterator[ConfigProblem]:
    """Yield the problems of options that do not depend on the experiment."""
    if flags.start_profile_step > flags.end_profile_step:
        got, most = str(flags.start_profile_step), f"at most --end-profile-step ({flags.end_profile_step})"
        yield ConfigProblem("--start-profile-step", got, most, "Lower it, or raise --end-profile-step.")
    if flags.free_batch and flags.train_batch_size is not None:
        got, fix = "given with --train-batch-size", "Give one of the two."
        yield ConfigProblem("--free-batch", got, "only one of them", fix)
    sample = flags.sample_batch
    if isinstance(sample, str) and not Path(sample).is_file():
        fix = "Write one with torch.save(batch, 'batch.pt')."
        yield ConfigProblem("--sample-batch", sample, "a number of batches, or the file of one", fix)
    for path in flags.include:
        if not Path(path).exists():
            yield ConfigProblem("--include", str(path), "an existing file or directory", "Correct the path.")


def _experiment_problems(flags: SearchFlags, experiment: ExperimentConfig) -> Iterator[ConfigProblem]:
    if experiment.deepspeed is None:
        yield ConfigProblem(
            f"{experiment.path}: hyperparameters.{MAIN_KEY}",
            "not given",
            "the path of a DeepSpeed JSON file",
            "Add deepspeed_config: ds_config.json, and read it in the training code from there.",
        )
    if isinstance(flags.sample_batch, int) and trial_spec(experiment.entrypoint) is None:
        yield ConfigProblem(
            "--sample-batch",
            f"{flags.sample_batch}, and a script has no loader that could be asked for so many batches",
            "the file of a batch",
            "Write what its engine is called with by torch.save, or leave --sample-batch out.",
        )
    slots = max(experiment.slots_per_trial, 1)
    if flags.max_slots is not None and flags.max_slots < slots:
        expected = f"at least {slots}, the slots_per_trial, without which no trial ever starts"
        yield ConfigProblem("--max-slots", str(flags.max_slots), expected, f"Set it to {slots} or more.")
    named = experiment.hyperparameters.get(MAIN_KEY)
    words = _words(experiment)
    for flag, following in zip(words, [*words[1:], "-"], strict=False):
        name, _, given = flag.partition("=")
        given = given or following
        if name not in ("--deepspeed", "--deepspeed_config") or given.startswith("-"):
            continue
        if isinstance(named, str) and Path(given) != Path(named):
            yield ConfigProblem(
                f"{experiment.path}: entrypoint",
                f"a command with --deepspeed {given}",
                f"the file of hyperparameters.{MAIN_KEY} ({named}), which dsat changes",
                "Name the same file in both.",
            )


def _space_value_problems(flags: SearchFlags, space: Space) -> tuple[list[ConfigProblem], list[str]]:
    """Return (problems, warnings) about the values of ``--space`` and ``--tune``.

    If all values of a path are illegal, that is a problem. If only some are, each of them is a warning.
    """
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    for path, values in space.extra.items():
        found = {repr(value): space.rejection_reason(path, value) for value in values}
        reasons = {value: reason for value, reason in found.items() if reason is not None}
        if len(reasons) < len(values):
            warnings += [
                f"{_where_given(flags, path)}: {value} is never tried: {reason}"
                for value, reason in reasons.items()
            ]
            continue
        stages = ", ".join(map(str, space.stages))
        expected = f"at least one value that can be tried in ZeRO stage {stages}"
        fix = f"Correct or remove it. Why the first value is refused: {next(iter(reasons.values()))}"
        problems.append(ConfigProblem(_where_given(flags, path), f"[{', '.join(reasons)}]", expected, fix))
    return problems, warnings


def _flag_warnings(flags: SearchFlags) -> list[str]:
    warnings = [
        f"--{name.replace('_', '-')} is accepted and has no effect: the search runs in this process, not in a trial"
        for name in ("search_runner_config", "max_search_runner_restarts")
        if getattr(flags, name) is not None
    ]
    if flags.free_batch:
        warnings.append(
            "--free-batch lets the global batch change with the micro batch: what is learned per step changes, and the "
            "learning rate must be chosen anew for the batch that is found"
        )
    return warnings


def _words(experiment: ExperimentConfig) -> list[str]:
    given = experiment.entrypoint
    return shlex.split(given) if isinstance(given, str) else list(given or [])


def _where_given(flags: SearchFlags, path: str) -> str:
    """Return the source of a path's values for messages: ``--tune PATH`` or a file."""
    is_option = any(setting.startswith(f"{path}=") for setting in flags.tune)
    return f"--tune {path}" if is_option else f"{flags.space}: {path}"


def read_space(flags: SearchFlags, hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read ``--space`` and ``--tune``; return dotted path -> values to try.

    ``--space`` is a file in YAML or JSON. ``--tune KEY=V1,V2`` replaces the values that the file has for KEY. A path that
    begins with ``hyperparameters.`` must name one of ``hyperparameters``, those of the experiment.
    """
    given = {} if flags.space is None else read_yaml(Path(flags.space), f"--space {flags.space}").value
    if not isinstance(given, Mapping):
        fix = "Write zero_optimization.sub_group_size: [1e8, 1e9], for example."
        raise ConfigError(
            [ConfigProblem(f"{flags.space}", render(given), "a mapping of paths to lists", fix)]
        )
    given = {**given, **_read_tune(flags.tune)}
    problems: list[ConfigProblem] = []
    for name, values in given.items():
        where, hyperparameter = _where_given(flags, str(name)), str(name).removeprefix(HYPERPARAMETERS)
        if name in _CHOSEN_BY_DSAT:
            expected = "one that dsat does not choose by itself"
            problems.append(ConfigProblem(where, "a path", expected, _CHOSEN_BY_DSAT[name]))
        elif not isinstance(values, list) or not values:
            expected = "a list with at least one value"
            problems.append(ConfigProblem(where, render(values), expected, "List the values."))
        elif str(name) != hyperparameter and hyperparameter.split(".")[0] not in hyperparameters:
            fix = f"Add {hyperparameter} to the hyperparameters of the experiment, and read it in the trial."
            problems.append(ConfigProblem(where, "no hyperparameter", "a declared one", fix))
    if problems:
        raise ConfigError(problems)
    return {str(name): tuple(map(_as_size, values)) for name, values in given.items()}


def _read_tune(settings: Sequence[str]) -> dict[str, Any]:
    """Return path -> values of ``--tune KEY=V1,V2``, whose values are YAML."""
    values: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not path:
            fix = "Write --tune zero_optimization.sub_group_size=1e8,1e9, for example."
            problems.append(ConfigProblem("--tune", repr(setting), "KEY=V1,V2 with a dotted key", fix))
            continue
        try:
            values[path] = parse_yaml_value(text if text.startswith("[") else f"[{text}]", f"--tune {path}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return values


def _as_size(value: Any) -> Any:
    """Convert a number that YAML reads as text; make whole floats integers (1e9).

    Floats below 1000 and values that are no numbers are returned unchanged.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1000 else value


# ---- "auto" batch sizes ----------------------------------------------------------------------


def with_batch_sizes(experiment: ExperimentConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (DeepSpeed config with batch sizes filled in, warnings).

    Sizes that are missing or "auto" become numbers. The config is returned unchanged if the script uses neither Hugging Face's
    Trainer nor Accelerate. Numbers in the config have priority. For a Trainer, options in the entrypoint come next.
    Hyperparameters of the same name (also below ``training_arguments``) follow. The Trainer's defaults come last, with a
    warning.

    Raises:
        ConfigError: only the script's code has the sizes, or an argument of the script is no valid size.
    """
    source = experiment.deepspeed
    assert source is not None
    sizes = {key: source.merged.get(key) for key in BATCH_KEYS}
    filler = AutoValues.of(find_script(_words(experiment), experiment.context_dir))
    if filler is None or all(value not in (None, AUTO) for value in sizes.values()):
        return source.merged, ()
    findings = Diagnostics(source.lines, source.label)
    warnings: tuple[str, ...] = ()
    if filler.is_trainer:
        filler, warnings = _with_arguments(filler, experiment, sizes, findings)
    replicas = batch_replicas(source.merged, experiment.sizes)
    solution = filler.solve(sizes, replicas, {key: findings.place(key) for key in BATCH_KEYS})
    if solution is None:
        problem = ConfigProblem(
            findings.place(_MICRO),
            f'"{AUTO}"' if sizes[_MICRO] == AUTO else "not given",
            "a number, which a search divides: here only the script's DataLoader knows it",
            "Write the batch_size of that DataLoader there, and let the script take its own from "
            "reporter.micro_batch_size(...) of dstrial.integrations.accelerate.Reporter.",
        )
        raise ConfigError([problem])
    return {**source.merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}, warnings


def _with_arguments(
    filler: AutoValues, experiment: ExperimentConfig, sizes: Mapping[str, Any], findings: Diagnostics
) -> tuple[AutoValues, tuple[str, ...]]:
    """Return (copy of ``filler`` with batch sizes from the hyperparameters, warnings).

    Only sizes that neither the DeepSpeed config (``sizes``) nor the entrypoint sets are added. Each warning names a size for
    which the Trainer's default is used.
    """
    where = f"{experiment.path}: entrypoint"
    arguments, problems, warnings = filler.arguments, [], []
    if len(arguments.words) == 1 and arguments.words[0].endswith((".json", ".yaml", ".yml")):
        flags = " and ".join(f"--{flag}" for flag in SIZE_FLAGS.values())
        fix = f"Write the arguments themselves into the entrypoint, or numbers into {findings.place(_MICRO)}."
        got = f"a script with its arguments in {arguments.words[0]}"
        raise ConfigError([ConfigProblem(where, got, f"{flags} where a search can change them", fix)])
    for key, flag in SIZE_FLAGS.items():
        if sizes[key] not in (None, AUTO):
            continue
        given = arguments.find(flag)
        if given is not None:
            if given.value is None or not given.value.isdecimal() or int(given.value) == 0:
                expected = "a whole number of at least 1 there, which a search divides"
                fix = f"Write the number there, or set {key} in the DeepSpeed config."
                problems.append(ConfigProblem(where, f"a command with --{flag} {given.value}", expected, fix))
            continue
        value = _hyperparameter(experiment.hyperparameters, flag)
        if value is not None:
            arguments = arguments.with_value(flag, str(value))
        elif sizes[_TOTAL] in (None, AUTO):
            default = DEFAULT_MICRO_BATCH if key == _MICRO else 1
            warnings.append(
                f"{findings.place(key)} is left to the Trainer, and the entrypoint has no --{flag}: its default of {default} is "
                f"taken for your own. Where the script sets another one, write --{flag} into the entrypoint"
            )
    if problems:
        raise ConfigError(problems)
    return AutoValues(filler.name, filler.is_trainer, arguments), tuple(warnings)


def _hyperparameter(hyperparameters: Mapping[str, Any], name: str) -> int | None:
    below = hyperparameters.get("training_arguments")
    for values in (hyperparameters, below if isinstance(below, Mapping) else {}):
        value = values.get(name)
        if type(value) is int and value > 0:
            return value
    return None
