"""Check rules of the experiment config that relate several fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.schema import ENDED_SEARCHERS, SEARCHER_COMMON, SEARCHERS, Length


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


def period(raw: Mapping[str, Any], key: str) -> Length | None:
    """Return the length at ``key`` of a checked config; None for a length of 0."""
    length = Length.from_config(raw[key])
    return length if length.value else None
