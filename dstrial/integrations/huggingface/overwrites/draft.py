"""A Trainer's command line and DeepSpeed config while they are brought together."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import AUTO
from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_source import OVERWRITE_KEY, DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, key_path, render
from dstrial.errors import ConfigProblem

COMMAND_LINE = "command line"


class Resolution(enum.Enum):
    """How an argument and a key were brought together."""

    EQUAL = "both say the same"
    ARGUMENT_SET = "the argument is added with the key's value"
    ARGUMENT_CHANGED = "they contradict each other: the argument is changed to the key's value"
    ARGUMENT_REMOVED = "they contradict each other: the argument is removed"
    KEY_SET = "the key is set, so that the argument has an effect"
    KEY_CHANGED = "they contradict each other: the key is changed"
    SOLVED = "solved by the batch equation"
    KEPT = "solved for the batch of the checkpoint that the run goes on from"
    TRAINER = "the Trainer fills it in from the argument, or from the argument's default"

    @property
    def is_contradiction(self) -> bool:
        """Whether two things that the user wrote could not both hold."""
        return self in (Resolution.ARGUMENT_CHANGED, Resolution.ARGUMENT_REMOVED, Resolution.KEY_CHANGED)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One argument or key, and how it was settled."""

    argument: str  # `--learning_rate`; empty if none is involved
    key: str  # dotted; empty if none is involved
    outcome: Resolution
    text: str  # a sentence with both values, the winner, and how to change it


class Draft:
    """The one mutable object of a reconciliation: the result, and the decisions."""

    def __init__(self, arguments: CommandLine, source: DeepSpeedSource) -> None:
        self.source = source
        self.arguments = arguments
        self.config: dict[str, Any] = copy.deepcopy(source.merged)
        overwritten = {path: source.lines.get(path) or OVERWRITE_KEY for path in source.overwritten}
        self.findings = Diagnostics({**source.lines, **overwritten}, source.label)
        self.decisions: list[Decision] = []
        self._given = arguments

    # ---- what the user wrote -------------------------------------------------------------------------

    def key_value(self, key: str) -> Any:
        """Return the value under a dotted key; None for no value or null."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def number_of_key(
        self, key: str, *, minimum: float | None = None, is_whole: bool = False
    ) -> float | None:
        """Return a key's number; None if absent, ``"auto"``, or wrong, which is recorded."""
        value = self.key_value(key)
        if value is None or value == AUTO:
            return None
        return self._checked_number(key, value, minimum, is_whole=is_whole)

    def number_of_flag(
        self, name: str, *, minimum: float | None = None, is_whole: bool = False
    ) -> float | None:
        """Return a flag's number; None if not given, or wrong, which is recorded."""
        flag = self._given.find(name)
        if flag is None:
            return None
        number = _number(flag.value)
        if number is None or not _is_legal(number, minimum, is_whole=is_whole):
            got = "without a value" if flag.value is None else render(flag.value)
            expected = _expectation(minimum, is_whole=is_whole)
            self.problem(f"--{name}", got, expected, f"Write --{name} and such a value.")
            return None
        return int(number) if is_whole else number

    def truth_of_flag(self, name: str) -> bool:
        return self._given.truth(name) is True

    def is_given(self, name: str) -> bool:
        return self._given.find(name) is not None

    def is_overwritten(self, key: str) -> bool:
        """Say whether the value of a key comes from ``overwrite_deepspeed_args``."""
        path = key_path(key)
        return any(path[:length] in self.source.overwritten for length in range(1, len(path) + 1))

    def place(self, key: str) -> str:
        """Return the place of a key: ``file:line: key``, or among the overwrites."""
        return self.findings.place(key)

    # ---- what becomes of it --------------------------------------------------------------------------

    def set_key(self, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        section = self.config
        for part in sections:
            below = section.get(part)
            if not isinstance(below, dict):
                below = section[part] = {}
            section = below
        section[last] = value

    def set_flag(self, name: str, value: str) -> None:
        self.arguments = self.arguments.with_value(name, value)

    def remove_flag(self, name: str) -> None:
        self.arguments = self.arguments.without(name)

    def decide(self, argument: str, key: str, outcome: Resolution, text: str) -> None:
        self.decisions.append(Decision(f"--{argument}" if argument else "", key, outcome, text))

    def problem(self, flag: str, got: str, expected: str, fix: str) -> None:
        """Record an error of the command line, once."""
        found = ConfigProblem(f"{COMMAND_LINE}: {flag}", got, expected, fix)
        if found not in self.findings.problems:
            self.findings.problems.append(found)

    def _checked_number(self, key: str, value: Any, minimum: float | None, *, is_whole: bool) -> float | None:
        expected = f'{_expectation(minimum, is_whole=is_whole)}, or "{AUTO}"'
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            meant = _number(value) if isinstance(value, str) else None
            fix = "Write a number." if meant is None else f"Write {_as_yaml(meant)}, without quotes."
            self.findings.problem(key, render(value), expected, fix)
            return None
        if not _is_legal(value, minimum, is_whole=is_whole):
            self.findings.problem(key, render(value), expected, "Write such a number.")
            return None
        return int(value) if is_whole else value


def auto_hint(key: str) -> str:
    """Return how to let an argument win over a key."""
    *sections, last = key.split(".")
    inner = f"{last}: {AUTO}"
    for section in reversed(sections):
        inner = f"{section}: {{{inner}}}"
    return f"For the argument to win, set overwrite_deepspeed_args: {{{inner}}}."


def as_text(value: float | int | str) -> str:
    """Return a number as a flag takes it, to be read back as the same number."""
    return value if isinstance(value, str) else repr(value)


def _is_legal(number: float, minimum: float | None, *, is_whole: bool) -> bool:
    if not math.isfinite(number):
        return False
    return (not is_whole or number == int(number)) and (minimum is None or number >= minimum)


def _expectation(minimum: float | None, *, is_whole: bool) -> str:
    kind = "a whole number" if is_whole else "a number"
    return kind if minimum is None else f"{kind} of at least {minimum:g}"


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _as_yaml(number: float) -> str:
    """Return a number as YAML 1.1 reads it, to which ``1e-3`` is a text."""
    text = repr(int(number) if number == int(number) else number)
    mantissa, separator, exponent = text.partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}" if separator else text
