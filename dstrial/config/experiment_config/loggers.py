"""Read and check ``data.dstrial.loggers``, a run's loggers such as W&B."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.keys import Rule, Section, check_keys
from dstrial.config.schema import DIALECT
from dstrial.config.secrets import SecretNames
from dstrial.errors import install_command

KEY = "data.dstrial.loggers"

_SECRET_HINTS = ("key", "token", "secret", "passw")
_PATH: KeyPath = ("data", "dstrial", "loggers")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _rule(expected: str, fix: str, is_right: Callable[[Any], bool], **fields: Any) -> Rule:
    return Rule(("any",), check=lambda value: None if is_right(value) else expected, fix=fix, **fields)


_TEXT = _rule("a text", "Write one, or leave the option out.", _is_text)
_TEXTS = _rule(
    "a list of texts",
    "Write [baseline], for example.",
    lambda value: isinstance(value, list) and all(map(_is_text, value)),
)
_NAMED_TEXTS = _rule(
    "a mapping of texts",
    "Write {team: vision}, for example.",
    lambda value: isinstance(value, Mapping) and all(map(_is_text, value.values())),
)


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerKind:
    """Options that one kind of logger accepts, and its secret's variable."""

    options: Section
    secret: str  # how users provide the secret, for messages


def _kind(secret: str, **options: Rule) -> LoggerKind:
    return LoggerKind(Section(options, fills_in=False), secret)


LOGGERS: Mapping[str, LoggerKind] = {
    "wandb": _kind(
        "WANDB_API_KEY",
        **dict.fromkeys(("project", "entity", "group", "name", "dir"), _TEXT),
        tags=_TEXTS,
        mode=Rule(("string",), enum=("online", "offline")),
    ),
    "mlflow": _kind(
        "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        **dict.fromkeys(("experiment_name", "tracking_uri", "run_name"), _TEXT),
        tags=_NAMED_TEXTS,
    ),
    "trackio": _kind("HF_TOKEN", **dict.fromkeys(("project", "group", "space_id"), _TEXT)),
}
"""Name of a logger -> its kind. The logger's package and dstrial's extra have the same name."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoggerSpec:
    """One logger of a run, with its options."""

    name: str  # a key of `LOGGERS`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_installed(name: str) -> bool:
    """Return whether a logger's package is installed, without importing it."""
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
    """Check a config's loggers; ``installs_itself``: the trial may install packages."""
    for spec in _read(dstrial_section(raw).get("loggers"), findings):
        if has_package(spec.name):
            continue
        if installs_itself:
            findings.note(KEY, f"names {spec.name}, which is not installed here; the trial has to install it")
        else:
            got = f"{spec.name}, which is not installed"
            findings.problem(KEY, got, "a logger whose package is there", how_to_install(spec.name))


def with_loggers(given: Any, names: Sequence[str]) -> list[Any] | None:
    """Add names from ``--logger`` to a config's loggers; None if ``given`` is no list."""
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
        fix = f"Write {name}, or {{{name}: {{{next(iter(LOGGERS[name].options.keys))}: …}}}}."
        findings.problem((*path, name), render(options), "a mapping of options", fix)
        return None
    where = (*path, name)
    secret_keys = {key for key, value in options.items() if _has_secret(name, str(key), value)}
    for key in secret_keys:
        fix = f"Take it out, and set {LOGGERS[name].secret} in the environment."
        findings.problem(
            (*where, str(key)), "a secret in the config", "secrets from the environment only", fix
        )
    rest = {key: value for key, value in options.items() if key not in secret_keys}
    check_keys(LOGGERS[name].options, rest, DIALECT, findings, where)
    return LoggerSpec(name, {str(key): value for key, value in rest.items() if value is not None})


def _has_secret(name: str, key: str, value: Any) -> bool:
    names = SecretNames()
    if key in LOGGERS[name].options.keys:
        return isinstance(value, str) and names.has_variable("", value)
    return names.has_field(key, value) or any(hint in key.lower() for hint in _SECRET_HINTS)
