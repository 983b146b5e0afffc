"""Read ``data.dstrial``: training checks, elastic slots and requirements."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import count_in, dstrial_section
from dstrial.config.keys import Section, check_keys
from dstrial.config.schema import DIALECT, DSTRIAL

HOOK_NAME = "startup-hook.sh"  # Determined's name for a script that runs before the trial

_TRAINING_CHECKS = ("non_finite", "non_finite_patience", "stall_timeout", "stall_action")
_DEFAULTS = {key: rule.default for key, rule in DSTRIAL.keys.items()}
_INSTALLERS = re.compile(r"\b(?:pip3?(?:\.\d+)?|uv|poetry|easy_install|setup\.py)\b")
_INSTALLING = re.compile(r"\b(?:install|develop|sync|easy_install)\b")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingChecks:
    """What a run does about non-finite losses and about stalled ranks."""

    # Action after `non_finite_patience` consecutive reports without a finite loss or without an optimizer step;
    # `fail` does not save the weights.
    non_finite: Literal["fail", "warn", "ignore"] = _DEFAULTS["non_finite"]
    non_finite_patience: int = _DEFAULTS["non_finite_patience"]
    # A batch, validation or checkpoint is stalled if it takes this many seconds more than the longest so far.
    stall_timeout: float = _DEFAULTS["stall_timeout"]
    stall_action: Literal["report", "restart"] = _DEFAULTS["stall_action"]

    @classmethod
    def from_config(cls, exp_conf: Mapping[str, Any] | None) -> TrainingChecks:
        """Read the settings of an experiment config; ConfigError for invalid values."""
        section = dstrial_section(exp_conf)
        findings = Diagnostics({}, "experiment config")
        known = Section({key: DSTRIAL.keys[key] for key in _TRAINING_CHECKS}, is_open=True)
        check_keys(known, section, DIALECT, findings, ("data", "dstrial"))
        findings.raise_if_any()
        return cls(**{key: section[key] for key in _TRAINING_CHECKS if section.get(key) is not None})


@dataclasses.dataclass(frozen=True, slots=True)
class Elasticity:
    """Numbers of slots with which an elastic trial may resume from a checkpoint."""

    wish: int  # `resources.slots_per_trial`, the initial number of slots
    at_least: int | None  # `min_slots`; None if it is not given
    at_most: int  # `max_slots`, by default `wish`
    period_s: float  # minimum time between two increases of the number of slots, in seconds

    @property
    def is_asked_for(self) -> bool:
        """Whether the config sets ``min_slots``, or sets ``max_slots`` above ``wish``."""
        return self.at_least is not None or self.at_most > self.wish


def elasticity_of(section: Mapping[str, Any], slots_per_trial: int) -> Elasticity:
    """Return the numbers of slots in ``data.dstrial``; invalid ones count as missing.

    ``section`` is ``data.dstrial``. ``slots_per_trial`` is the default of ``max_slots``.
    """
    at_least, at_most = count_in(section, "min_slots"), count_in(section, "max_slots")
    given = section.get("resize_period")
    period_s = given if isinstance(given, (int, float)) and given else _DEFAULTS["resize_period"]
    at_most = max(at_most or slots_per_trial, slots_per_trial)
    return Elasticity(slots_per_trial, at_least, at_most, float(period_s))


def check_slots(section: Mapping[str, Any], slots_per_trial: Any, findings: Diagnostics) -> None:
    """Record a problem unless ``min_slots <= slots_per_trial <= max_slots``.

    ``section`` is ``data.dstrial``; ``slots_per_trial`` is not checked if it is no integer.
    """
    if not isinstance(slots_per_trial, int):
        return
    at_least, at_most = count_in(section, "min_slots"), count_in(section, "max_slots")
    if at_least is not None and at_least > max(slots_per_trial, 1):
        expected = f"at most {max(slots_per_trial, 1)}, the slots_per_trial"
        findings.problem("data.dstrial.min_slots", str(at_least), expected, "Lower it.")
    if at_most is not None and at_most < slots_per_trial:
        findings.problem(
            "data.dstrial.max_slots",
            str(at_most),
            f"at least {slots_per_trial}, the slots_per_trial",
            "Raise it, or lower resources.slots_per_trial to what the trial is to begin with.",
        )


def requirements_of(config: Mapping[str, Any]) -> str | None:
    """Return a config's requirements file, relative to the model definition, or None."""
    name = dstrial_section(config).get("requirements")
    return name if isinstance(name, str) else None


def may_install(text: str) -> bool:
    """Return whether a shell script seems to install Python packages."""
    return _INSTALLERS.search(text) is not None and _INSTALLING.search(text) is not None


def check_requirements(raw: Mapping[str, Any], context_dir: Path, findings: Diagnostics) -> None:
    """Record a problem if the requirements file is not in the model definition."""
    key, name = "data.dstrial.requirements", requirements_of(raw)
    if name is None:
        return
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        expected, fix = "a path in the model definition", "Write requirements.txt, for example."
        findings.problem(key, render(name), expected, fix)
    elif context_dir.is_dir() and not (context_dir / name).is_file():
        got, expected = f"{render(name)}, which is not there", "a file of the model definition"
        findings.problem(key, got, expected, "Add it, or correct the name.")
