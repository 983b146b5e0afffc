"""Check rules of the experiment config that relate several fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.keys import Dialect, check_keys
from dstrial.config.schema import ENDED_SEARCHERS, EXPERIMENT, SEARCHER_COMMON, SEARCHERS, Length

# Section -> keys that need containers, or that Determined 0.38.1 also ignores for DeepSpeed trials.
_UNUSED = {
    "": "bind_mounts data_layer internal optimizations pbs security tensorboard_storage",
    "environment": "add_capabilities drop_capabilities force_pull_image image pod_spec ports registry_auth",
    "resources": "agent_label devices native_parallel shm_size weight",
}


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


def unused_by_run(raw: Mapping[str, Any], *, has_slurm: bool) -> list[str]:
    """Return dotted keys with non-default values that ``dstrial run`` does not use.

    ``has_slurm``: whether the run is a Slurm job, which uses section ``slurm``.
    """
    storage = raw["checkpoint_storage"]
    is_own = storage["type"] in (None, "shared_fs")  # checkpoints lie in the run directory
    unused = [f"checkpoint_storage.{key}" for key in storage if is_own and not key.startswith("save_")]
    unused += [f"{section}.{key}".lstrip(".") for section in _UNUSED for key in _UNUSED[section].split()]
    if not has_slurm:
        unused.append("slurm")
    defaults = check_keys(EXPERIMENT, {}, Dialect(name=""), Diagnostics({}, ""))
    return sorted(key for key in unused if value_at(raw, key) != value_at(defaults, key))


def period(raw: Mapping[str, Any], key: str) -> Length | None:
    """Return the length at ``key`` of a checked config; None for a length of 0."""
    length = Length.from_config(raw[key])
    return length if length.value else None


def check_profiling(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    """Check that profiling begins before it ends; warn of keys without effect.

    Source: Determined 0.38.1 reads only ``enabled`` (``pytorch/deepspeed/_deepspeed_trial.py:343``).
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
