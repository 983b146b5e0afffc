"""What ``convert`` takes and returns, and the draft of a conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.errors import ConfigError, ConfigProblem

JSON_NAME = "ds_config.json"
"""File name of the DeepSpeed JSON that the experiment config names."""

YAML_NAME = "experiment.yaml"
"""File name of the experiment config."""

KeyStatus = Literal["json", "yaml", "variable", "left", "unknown", "nowhere"]
"""Where a key is now: the DeepSpeed JSON, the experiment config, or a variable in it; left to the user, because it asks for
something that no experiment says; not known to accelerate 1.15; nowhere, because it asks for nothing or has no counterpart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Settings that an Accelerate config does not have."""

    entrypoint: str | None  # the script with its arguments; None if unknown
    micro_batch_size: int | None  # None to leave it to the script's loader
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    """The place of one key after the conversion."""

    key: str  # `section.key`
    value: Any  # as in the file
    outcome: KeyStatus
    explanation: str  # the key there, or the reason


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion."""

    deepspeed: dict[str, Any]  # the DeepSpeed JSON
    slots: int  # ranks of the job
    variables: dict[str, str]  # environment variables of the experiment
    overwrites: dict[str, Any]  # of the experiment config, over the JSON
    keys: tuple[ConvertedKey, ...]  # every key of the Accelerate config, in its order
    choices: Choices
    is_cpu: bool


class ConversionDraft:
    """The one mutable object of a conversion."""

    def __init__(self, config: Mapping[str, Any], label: str, file: Mapping[str, Any] | None) -> None:
        self.config = config
        self.deepspeed: dict[str, Any] = {}
        self.zero: dict[str, Any] = {}
        self.stage = 0
        self.variables: dict[str, str] = {}
        self.slots = 1
        self.is_cpu = False
        self.is_deepspeed = config.get("distributed_type", "DEEPSPEED") == "DEEPSPEED"
        self.keys: list[ConvertedKey] = []
        self.problems: list[ConfigProblem] = []
        self.file = file if self.is_deepspeed else None
        self._label = label

    def note(self, key: str, value: Any, outcome: KeyStatus, explanation: str) -> None:
        self.keys.append(ConvertedKey(key, value, outcome, explanation))

    def problem(self, key: str, value: Any, expected: str, fix: str) -> None:
        self.problems.append(ConfigProblem(f"{self._label}: {key}", repr(value), expected, fix))

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of the file; empty if it is missing."""
        value = self.config.get(key)
        if value in (None, ""):
            return {}
        if not isinstance(value, Mapping):
            problem = ConfigProblem(
                f"{self._label}: {key}", repr(value), "a mapping", "Write its keys below it."
            )
            raise ConfigError([problem])
        return value

    def whole_number(self, value: Any, key: str, at_least: int) -> int:
        """Return a whole number; the least one, with a problem, if the value is none."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
            return value
        self.problem(key, value, f"an integer of at least {at_least}", "Correct it.")
        return at_least
