"""Check and complete submitted experiment configs; find the origin of each value."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, locate, render
from dstrial.config.documents import (
    Document,
    check_value,
    read_yaml_text,
    yaml_text,
)
from dstrial.config.dotted_keys import dstrial_section, leaves
from dstrial.config.experiment_config.config import check_experiment, check_searcher
from dstrial.config.experiment_config.environment import (
    INTERPRETER_VARIABLE,
    check_variables,
    images,
)
from dstrial.config.experiment_config.hyperparameters import (
    concrete_values,
    normalised_specs,
    specifications,
)
from dstrial.config.experiment_config.storage import complete_storage
from dstrial.config.keys import check_keys
from dstrial.config.merge import merge_policies, merge_template
from dstrial.config.schema import DIALECT, EXPERIMENT, SEARCHERS
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.metadata import SavedRun
from dstrial.resume.plan import resumable_slots

LABEL = "experiment config"  # name of a submitted config in messages

# Determined's default log policies.
_LOG_POLICIES = (
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*"},
)
# Image in place of a container image, in every complete config.
NO_IMAGE = "none: the embedded master runs trials without containers"
_MAX_AT_ONCE = 10_000  # trials that a searcher may create in one step
_MAX_GRID_POINTS = 10**9
_CAPPED_POINTS = 10**18  # above this number, grid points are not counted exactly
_ADJECTIVES = ("agile", "bold", "calm", "clever", "eager", "keen", "lucid", "quick", "vivid")
_NOUNS = ("badger", "comet", "falcon", "harbor", "maple", "orchid", "otter", "river", "tulip")


@dataclasses.dataclass(frozen=True, slots=True)
class MasterDefaults:
    """Settings that a master adds to every experiment config."""

    # For experiments without a storage; also fills missing fields of a storage with the same type.
    checkpoint_storage: Mapping[str, Any]
    environment_variables: tuple[str, ...] = ()  # each `NAME=value`; the experiment's variables follow
    # Whether to reject an experiment that needs more slots than exist or are allowed.
    launch_error: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A checked and completed experiment config that a client has submitted."""

    config: dict[str, Any]  # JSON values, with all defaults
    original: str  # YAML as written
    warnings: tuple[str, ...]  # whole sentences
    interpreter: str | None  # Python interpreter that the config sets; None for the master's interpreter
    exceeds_slots: bool  # whether a trial needs more slots than exist, so that it stays queued
    template: Mapping[str, Any] | None = None  # partial config that filled in missing keys; None without one


def check_submission(
    config_text: str,
    *,
    context_dir: Path,
    defaults: MasterDefaults,
    num_slots: int | None = None,
    resumed: SavedRun | None = None,
    template: Mapping[str, Any] | None = None,
    is_detached: bool = False,
    document: Document | None = None,
    has_files: bool = True,
) -> Submission:
    """Return a submitted config, checked and with all defaults filled in.

    Args:
        config_text: the experiment config as YAML.
        context_dir: directory of the unpacked model definition; an empty directory if none was submitted.
        defaults: the master's defaults.
        num_slots: number of slots of the master; None to skip the check of slots.
        resumed: the checkpoint to resume from; None for a new run. The check reports what prevents resuming.
        template: a partial config with values for missing keys.
        is_detached: whether trials run outside the master. They need no entrypoint, and the searcher is unused.
        document: the parsed ``config_text``, which is modified in place; None to parse ``config_text``.
        has_files: whether to check that the entrypoint's module or script exists; False if no model definition was submitted.

    Raises:
        ConfigError: the config is invalid; the error lists all problems.
    """
    document = document or read_yaml_text(config_text, LABEL)
    exceeds: list[bool] = []

    def check_more(raw: dict[str, Any], findings: Diagnostics) -> None:
        _check_grid(raw, findings)
        _check_concurrency(raw, findings)
        check_variables(raw, findings)
        _check_project(raw, findings)
        exceeds.append(_check_slots(raw, defaults, num_slots, resumed, findings))

    if isinstance(document.value, dict):
        _add_missing_values(document.value, template, defaults)
    searcher = _strip_searcher(document.value) if is_detached else {}
    experiment = check_experiment(
        document,
        Path(LABEL),
        context_dir,
        require_concrete=False,
        require_entrypoint=not is_detached,
        resumed=resumed,
        has_files=has_files,
        more_checks=check_more,
    )
    config = _completed(experiment.raw, document.value, searcher)
    return Submission(
        config=json.loads(json.dumps(config, default=str)),
        original=config_text,
        warnings=tuple(warning for warning in experiment.warnings if "is a search space" not in warning),
        interpreter=experiment.environment_variables.get(INTERPRETER_VARIABLE) or None,
        exceeds_slots=any(exceeds),
        template=template,
    )


def _add_missing_values(
    config: dict[str, Any], template: Mapping[str, Any] | None, defaults: MasterDefaults
) -> None:
    """Add values that the config lacks, in place.

    Values of ``template`` take precedence over those of ``defaults``.
    """
    of_master: dict[str, Any] = {"checkpoint_storage": defaults.checkpoint_storage}
    if defaults.environment_variables:
        of_master["environment"] = {"environment_variables": [*defaults.environment_variables]}
    for values in (template or {}, of_master):
        config.update(merge_template(values, config))


def _check_slots(
    raw: Mapping[str, Any],
    defaults: MasterDefaults,
    num_slots: int | None,
    resumed: SavedRun | None,
    findings: Diagnostics,
) -> bool:
    """Check a trial's slots; return whether too few exist for the trial to start.

    False if a resumed checkpoint can use fewer slots, or if ``num_slots`` is None. With ``defaults.launch_error``, too few
    slots are also recorded as a problem.
    """
    slots = raw["resources"]["slots_per_trial"]
    max_slots = raw["resources"]["max_slots"]
    if defaults.launch_error and isinstance(slots, int) and isinstance(max_slots, int) and slots > max_slots:
        findings.problem(
            "resources.max_slots",
            str(max_slots),
            f"at least {slots}, the slots_per_trial, without which no trial ever starts",
            "Raise it, or remove it.",
        )
    can_run_with_fewer = resumed is not None and _fits(resumed, raw, num_slots or 0)
    if num_slots is None or not isinstance(slots, int) or slots <= num_slots or can_run_with_fewer:
        return False
    if defaults.launch_error:
        findings.problem(
            "resources.slots_per_trial",
            str(slots),
            f"at most {num_slots}, the slots of this master",
            # Clients match this message of Determined 0.38.1 (agentrm, ValidateResources).
            f"request unfulfillable, please try requesting less slots: set it to {num_slots} or less, or set launch_error to "
            "false in the master's settings to queue it.",
        )
    return True


def _completed(raw: dict[str, Any], given: Mapping[str, Any], searcher: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a checked config with the values that a master fills in."""
    config = copy.deepcopy(raw)
    config["name"] = given.get("name") or random_name("Experiment")
    if (given.get("reproducibility") or {}).get("experiment_seed") is None:
        config["reproducibility"]["experiment_seed"] = int(time.time())
    config["searcher"].update(searcher)
    config["checkpoint_storage"] = complete_storage(config["checkpoint_storage"])
    # Disabled policies stay, so that the stored config means the same when it is submitted again.
    config["log_policies"] = [
        {"name": None, "action": None, "pattern": None, **policy}
        for policy in merge_policies(list(_LOG_POLICIES), given.get("log_policies") or [])
        if policy.get("pattern") or policy.get("name")
    ]
    config["labels"] = sorted({str(label) for label in config["labels"] or []})
    config["environment"]["image"] = images(config["environment"].get("image"), NO_IMAGE)
    return config


def _strip_searcher(config: Any) -> dict[str, Any]:
    """Replace the searcher of ``config`` in place by ``single`` with the same metric.

    Returns the original searcher; {} if the config has no valid searcher, which is then not replaced. This is for trials that
    run outside the master.

    Source: Determined 0.38.1, ``core_v2.Config``. Its searcher has a metric and tells whether there are several trials.
    """
    searcher = config.get("searcher") if isinstance(config, dict) else None
    if not isinstance(searcher, dict) or not isinstance(searcher.get("name"), str):
        return {}
    config["searcher"] = {
        "name": "single",
        **{key: searcher[key] for key in ("metric", "smaller_is_better") if key in searcher},
    }
    return searcher


def _fits(resumed: SavedRun, raw: Mapping[str, Any], num_slots: int) -> bool:
    """Return whether a checkpoint can be resumed on at most ``num_slots`` slots."""
    section = dstrial_section(raw)
    at_least = section.get("min_slots")
    smallest = at_least if isinstance(at_least, int) else 1
    return resumed.keeps_batch and any(
        resumable_slots(resumed, at_most=num_slots, at_least=smallest, extents=section)
    )


def search_section(given: Any) -> dict[str, Any]:
    """Return the checked ``hyperparameters`` and ``searcher`` of a config.

    For a preview of the search: other sections are not required. ConfigError lists all problems.
    """
    check_value(given, LABEL)
    findings = Diagnostics({}, LABEL)
    if not isinstance(given, dict):
        findings.problem(
            (), render(given), "a mapping with searcher and hyperparameters", "Pass an experiment config."
        )
        findings.raise_if_any()
    raw = check_keys(EXPERIMENT, given, DIALECT, findings)
    searcher = given.get("searcher")
    check_searcher(raw, searcher if isinstance(searcher, Mapping) else {}, findings)
    hyperparameters = raw["hyperparameters"]
    needs_counts = raw["searcher"]["name"] == "grid"
    concrete_values(hyperparameters, findings, require_concrete=False, needs_counts=needs_counts)
    _check_grid(raw, findings)
    findings.raise_if_any()
    return {"hyperparameters": normalised_specs(hyperparameters), "searcher": raw["searcher"]}


def _check_concurrency(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    # The master keeps these trials in memory and writes them in one commit.
    if findings.problems:
        return
    searcher = raw["searcher"]
    keys, limit = SEARCHERS[searcher["name"]].keys, searcher.get("max_concurrent_trials") or 0
    if "max_concurrent_trials" not in keys:
        return
    num_trials = searcher["max_trials"] if "max_trials" in keys else _num_grid_points(raw["hyperparameters"])
    # If no limit is given, some searchers start fewer trials than this.
    at_once = min(limit or num_trials, num_trials)
    if at_once > _MAX_AT_ONCE:
        findings.problem(
            "searcher.max_concurrent_trials",
            f"{limit}, with which up to {at_once} trials begin at once",
            f"at most {_MAX_AT_ONCE}",
            "Set it to the number of trials that can really run, 16 for example.",
        )


def _check_grid(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    """Record a problem if a grid is too large for a search to finish."""
    # The number of points may have more digits than Python prints.
    if findings.problems or raw["searcher"]["name"] != "grid":
        return
    if _num_grid_points(raw["hyperparameters"]) > _MAX_GRID_POINTS:
        findings.problem(
            "hyperparameters",
            f"a grid of more than {_MAX_GRID_POINTS} points",
            f"at most {_MAX_GRID_POINTS}",
            "Lower the counts, or search with name: random and max_trials.",
        )


def _num_grid_points(hyperparameters: Mapping[str, Any]) -> int:
    num_points = 1
    for _, spec in specifications(hyperparameters):
        if spec["type"] == "categorical":
            num_points *= len(spec["vals"])
        elif spec["type"] == "int":
            num_points *= min(spec["count"], spec["maxval"] - spec["minval"] + 1)
        elif spec["type"] != "const":
            num_points *= spec["count"]
        # Stop early: the product of thousands of counts has thousands of digits.
        num_points = min(num_points, _CAPPED_POINTS)
    return num_points


def _check_project(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    missing = [key for key in ("workspace", "project") if not raw[key]]
    if len(missing) == 1:
        other = "project" if missing == ["workspace"] else "workspace"
        findings.problem(
            missing[0], "not given", f"a name, as there is a {other}", f"Add {missing[0]}, or remove {other}."
        )


def random_name(what: str) -> str:
    """Return ``what`` with a random suffix, for example ``Experiment (calm-otter)``."""
    chosen = random.SystemRandom()
    return f"{what} ({chosen.choice(_ADJECTIVES)}-{chosen.choice(_NOUNS)})"


def read_override(text: str) -> dict[str, Any]:
    """Parse YAML overrides of ``det experiment continue``; empty text gives ``{}``."""
    changes = read_yaml_text(text, "the changed config").value or {}
    if not isinstance(changes, dict):
        raise ConfigError(
            [ConfigProblem("the changed config", render(changes), "a mapping", "Pass --config key=value.")]
        )
    return changes


def continued_config(active: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the config of a continued experiment, as YAML.

    ``active`` is the experiment's current config, which may differ from the submitted one. ``changes`` are merged into
    ``active`` as a config is merged into its template; values of ``changes`` take precedence. ConfigError is raised if the
    searcher's name changes. Source: Determined 0.38.1, master/internal, ``parseAndMergeContinueConfig``:
    ``schemas.Merge(provided, active)``.
    """
    merged = merge_template(active, changes)
    before, after = (_searcher_name(config) for config in (active, merged))
    if before != after:
        problem = ConfigProblem(
            "searcher.name",
            render(after),
            f"{render(before)}, as before",
            "Create a new experiment to change it.",
        )
        raise ConfigError([problem])
    return yaml_text(merged)


def _searcher_name(config: Mapping[str, Any]) -> Any:
    searcher = config.get("searcher")
    return searcher.get("name") if isinstance(searcher, Mapping) else None


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of an experiment's effective config, and where the value comes from."""

    key: str  # dotted
    value: Any  # JSON value; an empty mapping or a list counts as one value
    origin: str  # `experiment config:LINE`, "template" or "default"


def config_values(
    effective: Mapping[str, Any], submitted: Document, template: Mapping[str, Any] | None
) -> list[ConfigValue]:
    """Return every value of a completed config with its origin, in the config's order.

    Args:
        effective: the completed config, with changes since the submission.
        submitted: the config as the client wrote it.
        template: the template that was merged into the submission; None without one.
    """
    return [
        ConfigValue(dotted(path), value, _origin(path, submitted, template))
        for path, value in leaves(effective)
    ]


def _origin(path: KeyPath, submitted: Document, template: Mapping[str, Any] | None) -> str:
    if _is_given(submitted.value, path):
        return locate(submitted.lines, path, submitted.label)
    return "template" if template is not None and _is_given(template, path) else "default"


def _is_given(config: Any, path: KeyPath) -> bool:
    """Return whether a config sets the value at ``path``, possibly in a short form.

    An example of a short form is ``max_length: 100``, which sets ``max_length.batches``. Null counts as not set.
    """
    for part in path:
        if not isinstance(config, Mapping):
            return True  # such as max_length: 100
        if config.get(part) is None:
            return False
        config = config[part]
    return True
