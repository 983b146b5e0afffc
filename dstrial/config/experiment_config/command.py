"""Check the config of a command, TensorBoard or generic task.

Fields that only affect containers are checked and returned, but have no effect, as in experiment configs. Source: Determined
0.38.1, command configs: fields and defaults. A shell's entrypoint there is one string.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.experiment_config.environment import (
    INTERPRETER_VARIABLE,
    by_device,
    check_environment,
    check_variables,
    images,
)
from dstrial.config.experiment_config.submission import NO_IMAGE, random_name
from dstrial.config.keys import Dialect, Rule, Section, check_keys
from dstrial.config.merge import merge_template
from dstrial.config.schema import EXPERIMENT, RESOURCE_KEYS

CommandKind = Literal["COMMAND", "TENSORBOARD", "GENERIC"]

NAMES: Mapping[str, str] = {"COMMAND": "Command", "TENSORBOARD": "TensorBoard", "GENERIC": "Generic Task"}
"""Kind -> display name."""

DEFAULT_PRIORITY = 42  # Determined's default; a lower number is scheduled first

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def seconds_of(span: Any) -> float | None:
    """Return the seconds of a duration such as ``1h30m`` or ``90``; None if invalid."""
    if isinstance(span, bool):
        return None
    if isinstance(span, (int, float)):
        return float(span) if span >= 0 else None
    text = str(span)
    parts = _SPAN.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _check_timeout(value: Any) -> str | None:
    return "a time such as 30m or 1h30m" if seconds_of(value) is None else None


def _check_work_dir(value: Any) -> str | None:
    if not Path(str(value)).is_dir():
        return "a directory of this machine"
    return None if Path(str(value)).is_absolute() else "an absolute path"


_STRING = Rule(types=("string",))
_FALSE = Rule(types=("boolean",), default=False)
_COUNT = Rule(types=("integer",), minimum=0)
_RESOURCES = Section(
    # `slots_per_trial` comes from templates that experiments share.
    {**RESOURCE_KEYS, "slots": _COUNT, "slots_per_trial": _COUNT}
)
_COMMAND = Section(
    {
        "description": _STRING,
        "entrypoint": Rule(types=("string", "list")),
        "environment": EXPERIMENT.keys["environment"],
        "bind_mounts": EXPERIMENT.keys["bind_mounts"],
        "resources": Rule(types=("mapping",), section=_RESOURCES),
        "work_dir": Rule(
            types=("string",),
            check=_check_work_dir,
            fix="Write a full path, or remove it to run in the files that are sent along.",
        ),
        "idle_timeout": Rule(types=("string", "number"), check=_check_timeout, fix="Write 30m, for example."),
        "notebook_idle_type": Rule(types=("string",), default="kernels_or_terminals"),
        "tensorboard_args": Rule(types=("list",), default=[], items=_STRING),
        "debug": _FALSE,
        "log_policies": Rule(types=("list",), default=[]),
        "slurm": Rule(types=("mapping",), default={}),
        "pbs": Rule(types=("mapping",), default={}),
    }
)
_DIALECT = Dialect(name="the config of a command", null_is_absent=True)


@dataclasses.dataclass(frozen=True, slots=True)
class CommandConfig:
    """The checked config of a command, TensorBoard or generic task."""

    config: dict[str, Any]  # complete with defaults, JSON values
    words: tuple[str, ...]  # the command to run, split into words; empty for a TensorBoard

    @property
    def num_slots(self) -> int:
        return int(self.config["resources"]["slots"])

    @property
    def priority(self) -> int:
        return int(self.config["resources"]["priority"] or DEFAULT_PRIORITY)


def check_command(
    given: Mapping[str, Any],
    kind: CommandKind,
    *,
    num_slots: int,
    environment_variables: tuple[str, ...] = (),
    template: Mapping[str, Any] | None = None,
    launch_error: bool = True,
) -> CommandConfig:
    """Return a checked command config with all defaults filled in.

    Args:
        given: the config as written.
        kind: command, TensorBoard or generic task. A TensorBoard takes no slots by default, other kinds take one.
        num_slots: the most slots on one machine; a config that requests more is rejected, except as ``launch_error`` says.
        environment_variables: ``NAME=value`` texts to place before the config's variables.
        template: values for missing keys; None without a template.
        launch_error: whether a template's request for too many slots is an error. If false, the config is accepted if it
            does not set ``resources.slots`` itself, so that the task waits for slots.

    Raises:
        ConfigError: the config is invalid; the message lists all problems.
    """
    label = f"{NAMES[kind]} config"
    findings = Diagnostics({}, label)
    own = given.get("resources")
    has_own_slots = isinstance(own, Mapping) and own.get("slots") is not None
    if template is not None:
        given = merge_template({key: template[key] for key in template if key in _COMMAND.keys}, given)
    if environment_variables:
        variables = {"environment_variables": [*environment_variables]}
        given = merge_template({"environment": variables}, given)
    raw = check_keys(_COMMAND, given, _DIALECT, findings)
    check_environment(raw, findings)
    check_variables(raw, findings)
    resources = raw["resources"]
    if resources["slots_per_trial"] is None:
        del resources["slots_per_trial"]
    if resources["slots"] is None:
        resources["slots"] = 0 if kind == "TENSORBOARD" else 1
    # Determined 0.38.1 always rejects too many slots in the config itself (agentrm, ValidateResources), and checks the
    # config before it merges the template (api_command.go).
    may_wait = template is not None and not has_own_slots and not launch_error
    if isinstance(resources["slots"], int) and resources["slots"] > num_slots and not may_wait:
        findings.problem(
            "resources.slots",
            str(resources["slots"]),
            f"at most {num_slots}, the most slots of one machine, on which a command runs",
            f"request unfulfillable, please try requesting less slots: set it to {num_slots} or less, or to 0 for a process "
            "that needs none.",
        )
    if kind == "COMMAND" and raw["entrypoint"] is None:
        # As in Determined 0.38.1, whose script then executes nothing and exits 0.
        raw["entrypoint"] = ["true"]
    words = () if kind == "TENSORBOARD" else _words(raw["entrypoint"], findings)
    findings.raise_if_any()
    raw["description"] = raw["description"] or random_name(NAMES[kind])
    raw["environment"]["image"] = images(raw["environment"].get("image"), NO_IMAGE)
    return CommandConfig(json.loads(json.dumps(raw, default=str)), words)


def _words(entrypoint: Any, findings: Diagnostics) -> tuple[str, ...]:
    if isinstance(entrypoint, str) and entrypoint.strip():
        return ("sh", "-c", entrypoint)
    if isinstance(entrypoint, list) and entrypoint and all(isinstance(word, str) for word in entrypoint):
        return ("sh", "-c", entrypoint[0]) if len(entrypoint) == 1 else tuple(entrypoint)
    findings.problem(
        "entrypoint",
        "not given" if entrypoint in (None, [], "") else render(entrypoint),
        "a command, or a list of its words",
        "Write entrypoint: python3 job.py, for example, or give it behind `det command run`.",
    )
    return ()


def interpreter_of(config: Mapping[str, Any]) -> str | None:
    """Return the path of the Python interpreter that a config sets, or None.

    A config sets the path in the environment variable ``DET_PYTHON_EXECUTABLE`` for device kind ``cpu``.
    """
    variables = by_device(config["environment"]["environment_variables"]).get("cpu") or []
    return dict(variable.partition("=")[::2] for variable in variables).get(INTERPRETER_VARIABLE) or None
