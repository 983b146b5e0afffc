"""What becomes of an Accelerate config: the values that ``convert`` takes and returns."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

JSON_NAME = "ds_config.json"
"""File name of the DeepSpeed JSON that the experiment config names."""

YAML_NAME = "experiment.yaml"
"""File name of the experiment config."""

Outcome = Literal["json", "yaml", "variable", "left", "unknown", "nowhere"]
"""Where a key is now: the DeepSpeed JSON, the experiment config, or a variable in it; left to the user, because it asks for
something that no experiment says; not known to accelerate 1.15; nowhere, because it asks for nothing or has no counterpart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """What an Accelerate config cannot say.

    Attributes:
        entrypoint: the script with its arguments; None if it is not known.
        micro_batch_size: records of one forward pass on one rank; None to leave it to the script's loader.
        name: name of the experiment.
        metric: the validation metric that the searcher compares; None if it is not known.
        num_batches: how long to train, optimizer steps; None if it is not known.
        learning_rate: of an AdamW in the DeepSpeed JSON; None if the script makes its own optimizer.
    """

    entrypoint: str | None
    micro_batch_size: int | None
    name: str
    metric: str | None = None
    num_batches: int | None = None
    learning_rate: float | None = None


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
    outcome: Outcome
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
