"""Rules of the experiment config that a table of fields cannot hold."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.elasticity import KEYS as ELASTICITY_KEYS
from dstrial.config.elasticity import check_elasticity
from dstrial.config.experiment_config.sections import DEVICES, check_devices, of_device
from dstrial.config.experiment_config.training_checks import KEYS as TRAINING_CHECK_KEYS
from dstrial.config.experiment_config.training_checks import check_training_checks
from dstrial.config.keys import Dialect, check_keys
from dstrial.config.parallel_dims import DIM_KEYS
from dstrial.config.schema import ENDED_SEARCHERS, EXPERIMENT, SEARCHERS, Length, is_length

# By section; what needs containers, or what the DeepSpeed trials of Determined 0.38.1 do not read either.
_UNUSED = {
    "": "bind_mounts data_layer internal optimizations pbs security tensorboard_storage",
    "environment": "add_capabilities drop_capabilities force_pull_image image pod_spec ports registry_auth",
    "resources": "agent_label devices native_parallel shm_size weight",
}
_OF_A_MASTER = {
    "": "debug description integrations labels log_policies project records_per_epoch retention_policy workspace",
    "data.dstrial": f"{' '.join(ELASTICITY_KEYS)} requirements",
    "environment": "proxy_ports requirements",
    "resources": "is_single_node max_slots priority resource_pool",
    "searcher": "source_checkpoint_uuid source_trial_id",
}
_PERIODS = ("min_validation_period", "min_checkpoint_period")
_SEARCHER_COMMON = (
    "name",
    "metric",
    "smaller_is_better",
    "source_trial_id",
    "source_checkpoint_uuid",
    "max_length",
    "max_time",
    "time_metric",
)


def check_searcher(raw: dict[str, Any], given: Mapping[str, Any], findings: Diagnostics) -> None:
    """Check the searcher; drop the fields of other searchers from ``raw``."""
    searcher = raw["searcher"]
    if not given:
        fix = "Add searcher: {name: single, metric: validation_loss, max_length: {batches: 1000}}."
        findings.problem("searcher", "not given", "a mapping with name and metric", fix)
        return
    name = searcher["name"]
    if name is None:
        if given.get("name") is None:
            findings.problem(
                "searcher.name", "not given", f"one of {', '.join(SEARCHERS)}", "Add name: single."
            )
    elif name in ENDED_SEARCHERS:
        fix = "Set it to adaptive_asha, or to single for one trial."
        findings.problem(
            "searcher.name", f"{render(name)}, which Determined has ended", "a searcher that exists", fix
        )
    elif name not in SEARCHERS:
        aliases = {"asha": "async_halving"}
        close = aliases.get(name) or next(iter(difflib.get_close_matches(name, SEARCHERS, n=1)), "single")
        findings.problem(
            "searcher.name", render(name), f"one of {', '.join(SEARCHERS)}", f"Set it to {close}."
        )
    else:
        _check_searcher_fields(name, searcher, given, findings)
        allowed = (*_SEARCHER_COMMON, *SEARCHERS[name].keys)
        raw["searcher"] = {key: value for key, value in searcher.items() if key in allowed}
    if searcher["metric"] is None and given.get("metric") is None:
        fix = "Name the validation metric that says which checkpoint is best."
        findings.problem("searcher.metric", "not given", "the name of a validation metric", fix)
    max_length = searcher["max_length"]
    if max_length is not None and not (
        is_length(max_length, allow_integer=True) and Length.from_config(max_length).value
    ):
        findings.problem(
            "searcher.max_length",
            render(max_length),
            "a number of batches, or one of {batches: n}, {epochs: n}, {records: n}, with n of at least 1",
            "Write {batches: 1000}, for example.",
        )
    if searcher["source_trial_id"] is not None and searcher["source_checkpoint_uuid"] is not None:
        fix = "Keep one of the two."
        findings.problem(
            "searcher.source_checkpoint_uuid", "given with source_trial_id", "one of the two", fix
        )


def _check_searcher_fields(
    name: str, searcher: Mapping[str, Any], given: Mapping[str, Any], findings: Diagnostics
) -> None:
    for field in SEARCHERS[name].requires:
        if searcher[field] is None and given.get(field) is None:
            fix = f"Add {field}."
            findings.problem(f"searcher.{field}", "not given", f"an integer of at least 1 for {name}", fix)
    is_timed = searcher["max_time"] is not None and searcher["time_metric"] is not None
    if SEARCHERS[name].is_timed and not is_timed and searcher["max_length"] is None:
        fix = "Add max_time: 1000 and time_metric: batches, for example."
        findings.problem("searcher.max_time", "not given", f"max_time and time_metric for {name}", fix)
    elif (searcher["max_time"] is None) != (searcher["time_metric"] is None):
        missing = "max_time" if searcher["max_time"] is None else "time_metric"
        if given.get(missing) is None:
            fix = "Add time_metric: batches." if missing == "time_metric" else "Add max_time: 1000."
            findings.problem(f"searcher.{missing}", "not given", "max_time and time_metric together", fix)
    for field in given:
        if field in searcher and field not in _SEARCHER_COMMON and field not in SEARCHERS[name].keys:
            findings.warn(f"searcher.{field}", f"has no effect with searcher {name}")


def unused_by_run(raw: Mapping[str, Any], *, has_master: bool, has_slurm: bool) -> list[str]:
    """Return the keys that a run ignores although they differ from the default."""
    unused = [f"checkpoint_storage.{key}" for key in raw["checkpoint_storage"] if not key.startswith("save_")]
    for table in [_UNUSED] if has_master else [_UNUSED, _OF_A_MASTER]:
        unused += [f"{section}.{key}".lstrip(".") for section in table for key in table[section].split()]
    if not has_slurm:
        unused.append("slurm")
    defaults = check_keys(EXPERIMENT, {}, Dialect(name=""), Diagnostics({}, ""))
    return sorted(key for key in unused if value_at(raw, key) != value_at(defaults, key))


def check_periods(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    for key in _PERIODS:
        if not is_length(raw[key], allow_integer=False):
            expected = "one of {batches: n}, {epochs: n}, {records: n} with n of at least 0"
            findings.problem(key, render(raw[key]), expected, "Write {batches: 100}, for example.")


def period(raw: Mapping[str, Any], key: str) -> Length | None:
    """Return a valid period; None if it is 0 or wrong."""
    if not is_length(raw[key], allow_integer=False):
        return None
    length = Length.from_config(raw[key])
    return length if length.value else None


def check_profiling(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    """Check that profiling begins before it ends, and name what has no effect.

    Source: Determined 0.38.1 reads ``enabled`` alone (``pytorch/deepspeed/_deepspeed_trial.py:343``).
    """
    profiling = raw["profiling"]
    begin, end = profiling["begin_on_batch"], profiling["end_after_batch"]
    if end is not None and begin > end:
        fix = "Exchange the two."
        findings.problem("profiling.begin_on_batch", render(begin), f"at most end_after_batch ({end})", fix)
    for key, usual in (("begin_on_batch", 0), ("end_after_batch", None), ("sync_timings", True)):
        if profiling[key] != usual:
            findings.warn(
                f"profiling.{key}",
                "has no effect: system metrics are collected as long as training lasts, and no device is waited for",
            )


def check_environment(raw: dict[str, Any], findings: Diagnostics) -> dict[str, dict[str, str]]:
    """Check the environment variables; complete ``raw`` in place as Determined does.

    Returns:
        Variables by device kind ("cpu", "cuda", "rocm").
    """
    image = raw["environment"]["image"]
    if isinstance(image, Mapping):
        check_devices(image, ("environment", "image"), findings)
    given = raw["environment"]["environment_variables"]
    if isinstance(given, Mapping):
        check_devices(given, ("environment", "environment_variables"), findings)
        by_device = {device: of_device(given, device) or [] for device in DEVICES}
    else:
        by_device = dict.fromkeys(DEVICES, given)
    variables: dict[str, dict[str, str]] = {}
    for device, entries in by_device.items():
        variables[device] = {}
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            name, separator, text = str(entry).partition("=")
            if not isinstance(entry, str) or not separator or not name:
                inner = (device, index) if isinstance(given, Mapping) else (index,)
                path: KeyPath = ("environment", "environment_variables", *inner)
                findings.problem(path, render(entry), "NAME=value", "Write OMP_NUM_THREADS=4, for example.")
            else:
                variables[device][name] = text
    raw["environment"]["environment_variables"] = {
        device: [f"{name}={text}" for name, text in entries.items()] for device, entries in variables.items()
    }
    return variables


def parallel_extent(raw: Mapping[str, Any], key: str, findings: Diagnostics) -> int | None:
    """Return a parallel size of ``data.dstrial``; None if absent."""
    section = raw["data"].get("dstrial")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        return None
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        findings.problem(
            f"data.dstrial.{key}", render(value), "an integer of at least 1", "Set it to 1 or more."
        )
        return None
    return value


def check_dstrial_section(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    section = raw["data"].get("dstrial")
    if section is None:
        return
    if not isinstance(section, Mapping):
        expected = f"a mapping with {', '.join(DIM_KEYS)}, min_slots, background_saving, non_finite or others"
        findings.problem(
            "data.dstrial", render(section), expected, "Write {pipeline_stages: 2}, for example."
        )
        return
    known = (
        *DIM_KEYS,
        *ELASTICITY_KEYS,
        "background_saving",
        "override_optimizer",
        "trust_checkpoint_code",
        *TRAINING_CHECK_KEYS,
        "determined_imports",
        "warm",
        "telemetry",
        "requirements",
        "loggers",
    )
    check_training_checks(section, findings)
    check_elasticity(section, raw["resources"]["slots_per_trial"], findings)
    for key in ("background_saving", "override_optimizer", "determined_imports", "warm", "telemetry"):
        value = section.get(key)
        if value is not None and not isinstance(value, bool):
            findings.problem(
                f"data.dstrial.{key}", render(value), "true or false", "Write true, or leave it out."
            )
    trusted = section.get("trust_checkpoint_code")
    if trusted is not None and (
        not isinstance(trusted, str) or re.fullmatch("[0-9a-f]{64}", trusted) is None
    ):
        findings.problem(
            "data.dstrial.trust_checkpoint_code",
            render(trusted),
            "the SHA-256 of a checkpoint's manifest, 64 hexadecimal digits, as the refusal of the checkpoint names it",
            "Copy it from there: only these very files are trusted then.",
        )
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            fix = f"Write {close[0]} instead." if close else "Remove it."
            findings.problem(f"data.dstrial.{key}", "not a key of data.dstrial", f"{' or '.join(known)}", fix)
