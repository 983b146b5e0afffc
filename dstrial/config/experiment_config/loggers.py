"""Read and check ``data.dstrial.loggers``, a run's loggers such as W&B."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.keys import Rule, Section, check_keys
from dstrial.config.schema import DIALECT
from dstrial.errors import install_command

KEY = "data.dstrial.loggers"

_PATH: KeyPath = ("data", "dstrial", "loggers")


def _check_texts(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return None if all(isinstance(one, str) for one in value.values()) else "a mapping of texts"
    return "a text" if isinstance(value, str) and not value.strip() else None


_TEXT = Rule(("string",), check=_check_texts, fix="Write one, or leave the option out.")
LOGGERS: Mapping[str, Section] = {
    "wandb": Section(
        {
            **dict.fromkeys(("project", "entity", "group", "name", "dir"), _TEXT),
            "tags": Rule(("list",), items=_TEXT, fix="Write [baseline], for example."),
            "mode": Rule(("string",), enum=("online", "offline")),
        },
        fills_in=False,
    ),
    "mlflow": Section(
        {
            **dict.fromkeys(("experiment_name", "tracking_uri", "run_name"), _TEXT),
            "tags": Rule(("mapping",), check=_check_texts, fix="Write {team: vision}, for example."),
        },
        fills_in=False,
    ),
}
"""Name of a logger -> its options; secrets come from the environment.

The logger's package and dstrial's extra have the same name.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerSpec:
    """One logger of a run, with its options."""

    name: str  # a key of `LOGGERS`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_installed(name: str) -> bool:
    """Return whether the Python package of logger ``name`` is installed.

    The package is not imported.
    """
    spec = importlib.util.find_spec(name)
    # A directory of the same name, as W&B creates in the working directory, has no origin.
    return spec is not None and spec.origin is not None


def how_to_install(name: str) -> str:
    return f"Run: {install_command(name)}"


def logger_specs(exp_conf: Mapping[str, Any] | None) -> tuple[LoggerSpec, ...]:
    """Read the loggers of an experiment config; raise ConfigError with all problems."""
    findings = Diagnostics({}, "experiment config")
    specs = _read(dstrial_section(exp_conf).get("loggers"), findings)
    findings.raise_if_any()
    return specs


def check_loggers(
    raw: Mapping[str, Any],
    findings: Diagnostics,
    *,
    installs_itself: bool,
    has_package: Callable[[str], bool] = is_installed,
) -> None:
    """Record a problem for each invalid logger, and for each whose package is missing.

    ``raw`` is the config with defaults. With ``installs_itself`` the trial may install packages, so a missing package is only
    a note. ``has_package`` returns whether a logger's package is installed, given the logger's name.
    """
    for spec in _read(dstrial_section(raw).get("loggers"), findings):
        if has_package(spec.name):
            continue
        if installs_itself:
            findings.note(KEY, f"names {spec.name}, which is not installed here; the trial has to install it")
        else:
            got = f"{spec.name}, which is not installed"
            findings.problem(KEY, got, "a logger whose package is there", how_to_install(spec.name))


def _read(given: Any, findings: Diagnostics) -> tuple[LoggerSpec, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        expected = f"a list with {', '.join(LOGGERS)}, or with {{NAME: {{…}}}} where one has options"
        findings.problem(KEY, render(given), expected, "Write [wandb], for example.")
        return ()
    specs: dict[str, LoggerSpec] = {}
    for index, entry in enumerate(given):
        path = (*_PATH, index)
        spec = _entry(entry, path, findings)
        if spec is not None and spec.name in specs:
            findings.problem(path, f"{spec.name} again", "each logger once", "Remove one of the two.")
        elif spec is not None:
            specs[spec.name] = spec
    return tuple(specs.values())


def _entry(entry: Any, path: KeyPath, findings: Diagnostics) -> LoggerSpec | None:
    is_pair = isinstance(entry, Mapping) and len(entry) == 1
    name, options = next(iter(entry.items())) if is_pair else (entry, None)
    if not isinstance(name, str):
        expected = "a logger's name, or a mapping of one name to its options"
        fix = "Write wandb, or {mlflow: {experiment_name: digits}}."
        findings.problem(path, render(entry), expected, fix)
        return None
    if name not in LOGGERS:
        close = difflib.get_close_matches(name, LOGGERS, n=1)
        fix = f"Write {close[0]} instead." if close else "Remove it."
        if name == "tensorboard":
            fix = "Remove it: TensorBoard's files are written by every run."
        findings.problem(path, render(name), f"one of {', '.join(LOGGERS)}", fix)
        return None
    known, where, options = LOGGERS[name], (*path, name), {} if options is None else options
    if not isinstance(options, Mapping):
        findings.problem(where, render(options), "a mapping of options", f"Write {name} alone.")
        return None
    options = {str(key): value for key, value in options.items() if value is not None}
    check_keys(known, options, DIALECT, findings, where)
    return LoggerSpec(name, options)
