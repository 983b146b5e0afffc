"""The keys of ``data.dstrial`` that watch training: defaults and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import dstrial_section

MODES = ("fail", "warn", "ignore")
STALL_ACTIONS = ("report", "restart")

KEYS = ("non_finite", "non_finite_patience", "stall_timeout", "stall_action")
"""Keys of ``data.dstrial`` that this module reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingChecks:
    """Checks of running training, and their consequences; see docs/trials.md."""

    # For reports in a row without a finite loss or an optimizer step; `fail` saves no such weights.
    non_finite: Literal["fail", "warn", "ignore"] = "fail"
    non_finite_patience: int = 3  # reports in a row
    stall_timeout: float = 120.0  # seconds beyond the longest batch, validation or checkpoint so far
    stall_action: Literal["report", "restart"] = "report"

    @classmethod
    def from_config(cls, exp_conf: Mapping[str, Any] | None) -> TrainingChecks:
        """Read an experiment config; ConfigError for impossible values."""
        section = dstrial_section(exp_conf)
        findings = Diagnostics({}, "experiment config")
        check_training_checks(section, findings)
        findings.raise_if_any()
        given: dict[str, Any] = {key: section[key] for key in KEYS if section.get(key) is not None}
        return cls(**given)


def explained(exp_conf: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return dotted key, value and whether it is given, of each setting."""
    section = dstrial_section(exp_conf)
    checks = TrainingChecks.from_config(exp_conf)
    return [(f"data.dstrial.{key}", getattr(checks, key), section.get(key) is not None) for key in KEYS]


def check_training_checks(section: Mapping[str, Any], findings: Diagnostics) -> None:
    mode = section.get("non_finite")
    if mode is not None and mode not in MODES:
        expected = "fail (the default), warn or ignore"
        findings.problem("data.dstrial.non_finite", render(mode), expected, "Write one of them.")
    patience = section.get("non_finite_patience")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        findings.problem(
            "data.dstrial.non_finite_patience",
            render(patience),
            "a number of reports of at least 1",
            "Set it to how many reports in a row may be without a finite loss.",
        )
    _check_stalls(section, findings)


def _check_stalls(section: Mapping[str, Any], findings: Diagnostics) -> None:
    timeout = section.get("stall_timeout")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < float("inf")):
        findings.problem(
            "data.dstrial.stall_timeout",
            render(timeout),
            "a number of seconds above 0",
            "Set it to how much longer than the longest so far a batch, validation or checkpoint may take.",
        )
    action = section.get("stall_action")
    if action is not None and action not in STALL_ACTIONS:
        expected = "report (the default) or restart"
        findings.problem("data.dstrial.stall_action", render(action), expected, "Write one of them.")
