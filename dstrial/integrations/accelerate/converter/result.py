"""What ``convert`` takes and returns, and the draft of a conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dstrial.errors import ConfigError, ConfigProblem
from dstrial.integrations.accelerate.converter.unsupported_keys import EMPTY

JSON_NAME = "ds_config.json"
"""File name of the DeepSpeed JSON that the experiment config names."""

YAML_NAME = "experiment.yaml"
"""File name of the experiment config."""

KeyStatus = Literal["json", "yaml", "variable", "left", "unknown", "nowhere"]
"""Where a key is now: the DeepSpeed JSON, the experiment config, or a variable in it; left to the user, because it asks for
something that no experiment says; not known to accelerate 1.15; nowhere, because it asks for nothing or has no counterpart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """What an Accelerate config cannot say.

    Attributes:
        entrypoint: the script with its arguments; None if it is not known.
        micro_batch_size: records of one forward pass on one rank; None to leave it to the script's loader.
        name: name of the experiment.
    """

    entrypoint: str | None
    micro_batch_size: int | None
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    """What became of one key.

    Attributes:
        key: as ``section.key``.
        value: as the file has it.
        outcome: where it is now.
        explanation: the key there, or the reason.
    """

    key: str
    value: Any
    outcome: KeyStatus
    explanation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result.

    Attributes:
        deepspeed: content of the DeepSpeed JSON.
        slots: ranks of the job.
        variables: environment variables of the experiment.
        overwrites: values of the experiment config that go over the JSON.
        keys: every key of the Accelerate config, in its order.
        choices: what the file could not say.
        is_cpu: whether the file asks for training on the CPU.
    """

    deepspeed: dict[str, Any]
    slots: int
    variables: dict[str, str]
    overwrites: dict[str, Any]
    keys: tuple[ConvertedKey, ...]
    choices: Choices
    is_cpu: bool


NOTHING = "asks for nothing"
UNKNOWN = "no key of accelerate 1.15; it is not taken over"

Take = Callable[["ConversionDraft", str, Any], None]
"""Takes one key, named as ``section.key``, and notes what became of it."""


class ConversionDraft:
    """The one mutable object of a conversion.

    Args:
        config: the file's content; not changed.
        label: how messages call the file.
        file: content of the DeepSpeed file that it names, if it names one.

    Attributes:
        deepspeed: keys of the DeepSpeed JSON, but ``zero_optimization``.
        zero: keys of ``zero_optimization``, but the stage.
        stage: of ZeRO.
        variables: environment variables by name.
        slots: ranks of the job.
        is_cpu: whether the file asks for training on the CPU.
        is_deepspeed: whether Accelerate would train with DeepSpeed.
        keys: what became of each key.
        problems: what is wrong with the file.
    """

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
        """Record what became of a key."""
        self.keys.append(ConvertedKey(key, value, outcome, explanation))

    def problem(self, key: str, value: Any, expected: str, fix: str) -> None:
        """Record what is wrong with a key."""
        self.problems.append(ConfigProblem(f"{self._label}: {key}", repr(value), expected, fix))

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of the file; empty if it is missing.

        Raises:
            ConfigError: it is something else than a mapping.
        """
        value = self.config.get(key)
        if value in (None, ""):
            return {}
        if not isinstance(value, Mapping):
            problem = ConfigProblem(
                f"{self._label}: {key}", repr(value), "a mapping", "Write its keys below it."
            )
            raise ConfigError([problem])
        return value

    def take_each(self, key: str, value: Any, take: Take) -> None:
        """Take every key of a section; a section that is empty asks for nothing."""
        if value in EMPTY:
            self.note(key, value, "nowhere", NOTHING)
            return
        for name, inner in self.section(key).items():
            take(self, f"{key}.{name}", inner)

    def whole_number(self, value: Any, key: str, at_least: int) -> int:
        """Return a whole number; the least one, with a problem, if the value is none."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
            return value
        self.problem(key, value, f"an integer of at least {at_least}", "Correct it.")
        return at_least
