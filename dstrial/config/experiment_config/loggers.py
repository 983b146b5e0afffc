"""``data.dstrial.loggers``: loggers of a run besides its own record. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.secrets import SecretNames
from dstrial.errors import install_command

KEY = "data.dstrial.loggers"

_SECRET_HINTS = ("key", "token", "secret", "passw")
_PATH: KeyPath = ("data", "dstrial", "loggers")


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerKind:
    """The options of a logger."""

    # Option -> text, list (of texts), mapping (to texts), or words to choose from.
    keys: Mapping[str, str | tuple[str, ...]]
    secret: str  # how its secret is given, for messages


LOGGERS: Mapping[str, LoggerKind] = {
    "wandb": LoggerKind(
        {
            "project": "text",
            "entity": "text",
            "group": "text",
            "name": "text",
            "tags": "list",
            "mode": ("online", "offline"),
            "dir": "text",
        },
        "WANDB_API_KEY",
    ),
    "mlflow": LoggerKind(
        {"experiment_name": "text", "tracking_uri": "text", "run_name": "text", "tags": "mapping"},
        "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    ),
    "trackio": LoggerKind({"project": "text", "group": "text", "space_id": "text"}, "HF_TOKEN"),
}
"""Every logger by its name, which is that of its package and of dstrial's extra as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerSpec:
    """One logger of a run."""

    name: str  # a key of `LOGGERS`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_installed(name: str) -> bool:
    """Say whether a logger's package can be imported, without importing it."""
    spec = importlib.util.find_spec(name)
    # A directory of the same name, as W&B leaves in the working directory, has no origin.
    return spec is not None and spec.origin is not None


def how_to_install(name: str) -> str:
    return f"Run: {install_command(name)}"


def logger_specs(exp_conf: Mapping[str, Any] | None) -> tuple[LoggerSpec, ...]:
    """Read the loggers of an experiment config; ConfigError with all problems."""
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
    """Check the loggers; ``installs_itself``: the trial may install their packages."""
    for spec in _read(dstrial_section(raw).get("loggers"), findings):
        if has_package(spec.name):
            continue
        if installs_itself:
            findings.note(KEY, f"names {spec.name}, which is not installed here; the trial has to install it")
        else:
            got = f"{spec.name}, which is not installed"
            findings.problem(KEY, got, "a logger whose package is there", how_to_install(spec.name))


def with_loggers(given: Any, names: Sequence[str]) -> list[Any] | None:
    """Add ``--logger`` to a config's loggers, each once; None if they are no list."""
    if given is not None and not isinstance(given, list):
        return None
    entries = list(given or [])
    known = {name for entry in entries for name in (entry if isinstance(entry, Mapping) else [entry])}
    return [*entries, *(name for name in dict.fromkeys(names) if name not in known)]


def _read(given: Any, findings: Diagnostics) -> tuple[LoggerSpec, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        expected = f"a list with {', '.join(LOGGERS)}, or with {{NAME: {{…}}}} where one has options"
        findings.problem(KEY, render(given), expected, "Write [wandb], for example.")
        return ()
    specs: list[LoggerSpec] = []
    for index, entry in enumerate(given):
        spec = _entry(entry, (*_PATH, index), findings)
        if spec is None:
            continue
        if any(other.name == spec.name for other in specs):
            findings.problem(
                (*_PATH, index), f"{spec.name} again", "each logger once", "Remove one of the two."
            )
        else:
            specs.append(spec)
    return tuple(specs)


def _entry(entry: Any, path: KeyPath, findings: Diagnostics) -> LoggerSpec | None:
    options: Any = {}
    name = entry
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, options),) = entry.items()
        options = {} if options is None else options
    if not isinstance(name, str):
        expected = "a logger's name, or a mapping of one name to its options"
        findings.problem(
            path, render(entry), expected, "Write wandb, or {mlflow: {experiment_name: digits}}."
        )
        return None
    if name not in LOGGERS:
        fix = "Remove it."
        if name == "tensorboard":
            fix = "Remove it: TensorBoard's files are written by every run."
        elif close := difflib.get_close_matches(name, LOGGERS, n=1):
            fix = f"Write {close[0]} instead."
        findings.problem(path, render(name), f"one of {', '.join(LOGGERS)}", fix)
        return None
    if not isinstance(options, Mapping):
        fix = f"Write {name}, or {{{name}: {{{next(iter(LOGGERS[name].keys))}: …}}}}."
        findings.problem((*path, name), render(options), "a mapping of options", fix)
        return None
    for key, value in options.items():
        _check_option(name, str(key), value, (*path, name, str(key)), findings)
    return LoggerSpec(name, {str(key): value for key, value in options.items() if value is not None})


def _check_option(name: str, key: str, value: Any, path: KeyPath, findings: Diagnostics) -> None:
    kind, secrets = LOGGERS[name], SecretNames()
    if key not in kind.keys:
        if secrets.has_field(key, value) or any(hint in key.lower() for hint in _SECRET_HINTS):
            fix = f"Remove it, and set {kind.secret} in the environment."
            findings.problem(path, "a secret in the config", "secrets from the environment only", fix)
            return
        close = difflib.get_close_matches(key, kind.keys, n=1)
        fix = f"Write {close[0]} instead." if close else "Remove it."
        findings.problem(path, f"not an option of {name}", " or ".join(kind.keys), fix)
        return
    if value is None:
        return
    expected = kind.keys[key]
    if isinstance(expected, tuple):
        if value not in expected:
            findings.problem(path, render(value), " or ".join(expected), "Write one of them.")
    elif expected == "list":
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(_is_text, value)):
            findings.problem(path, render(value), "a list of texts", "Write [baseline], for example.")
    elif expected == "mapping":
        if not isinstance(value, Mapping) or not all(map(_is_text, value.values())):
            findings.problem(path, render(value), "a mapping of texts", "Write {team: vision}, for example.")
    elif not _is_text(value):
        findings.problem(path, render(value), "a text", "Write one, or leave the option out.")
    elif secrets.has_variable("", value):
        fix = f"Take it out of the address, and set {kind.secret} in the environment."
        findings.problem(path, "an address with a password", "secrets from the environment only", fix)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
