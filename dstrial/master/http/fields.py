"""Typed access to request JSON, with keys in camelCase or snake_case."""

from __future__ import annotations

import enum
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from dstrial.errors import RequestError

T = TypeVar("T")

_SNAKE = re.compile(r"_+([a-zA-Z0-9])")
_MAX_INTEGER = 2**63 - 1
_MAX_SHOWN_CHARS = 80  # of a value in an error message


def camel(name: str) -> str:
    """Convert snake_case to camelCase: ``steps_completed`` to ``stepsCompleted``."""
    return _SNAKE.sub(lambda match: match[1].upper(), name) if "_" in name else name


class Fields(dict[str, Any]):
    """A JSON object of a request, with its keys normalised to camelCase.

    Keys of nested objects are unchanged, because they may be names of hyperparameters or metrics. Methods return None for an
    absent or null key, and raise HTTP 400 for a value of the wrong type. ``where`` names the object in error messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "the request's body") -> None:
        super().__init__({camel(key): value for key, value in values.items() if "_" in key})
        self.update({key: value for key, value in values.items() if "_" not in key})
        self._where = where

    def _typed(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.get(name)
        if value is None or isinstance(value, kind):
            return value
        raise self.wrong(name, expected)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.wrong(name, "a string")
        return value

    def integer(self, name: str, minimum: int = -_MAX_INTEGER - 1, maximum: int = _MAX_INTEGER) -> int | None:
        """Return the whole number at a key; the value may be a string such as "3".

        Protobuf's JSON has 64-bit integers as strings. Raises HTTP 400 for a number out of range.
        """
        value = self.get(name)
        if value is None:
            return None
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif (isinstance(value, float) and value.is_integer()) or (
            isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value)
        ):
            number = int(value)
        if number is None or not minimum <= number <= maximum:
            raise self.wrong(name, f"a whole number from {minimum} to {maximum}")
        return number

    def required_integer(
        self, name: str, minimum: int = -_MAX_INTEGER - 1, maximum: int = _MAX_INTEGER
    ) -> int:
        value = self.integer(name, minimum, maximum)
        if value is None:
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self.wrong(name, "a finite number")

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def items_of(self, name: str) -> list[Any] | None:
        return self._typed(name, list, "a list")

    def ids(self, name: str) -> list[int]:
        return self._items_like(name, _is_int32, "a whole number of 32 bits") or []

    def texts(self, name: str) -> list[str] | None:
        return self._items_like(name, lambda item: isinstance(item, str), "a string")

    def _items_like(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any] | None:
        values = self.items_of(name)
        for item_idx, item in enumerate(values or ()):
            if not fits(item):
                raise self._refusal(f"{name}[{item_idx}]", item, expected)
        return values

    def mapping(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict, "an object")

    def fields(self, name: str) -> Fields | None:
        value = self.mapping(name)
        return None if value is None else Fields(value, f"{self._where}.{name}")

    def field_list(self, name: str) -> list[Fields] | None:
        value = self._items_like(name, lambda item: isinstance(item, dict), "an object")
        if value is None:
            return None
        return [Fields(item, f"{self._where}.{name}[{item_idx}]") for item_idx, item in enumerate(value)]

    def choice(self, name: str, choices: Collection[str] | type[enum.Enum]) -> str | None:
        value = self.text(name)
        allowed = [str(member.value) for member in choices] if isinstance(choices, type) else sorted(choices)
        if value is None or value in allowed:
            return value
        raise self.wrong(name, "one of " + ", ".join(allowed))

    def wrong(self, name: str, expected: str) -> RequestError:
        return self._refusal(name, self.get(name), expected)

    def _refusal(self, place: str, value: Any, expected: str) -> RequestError:
        return RequestError(
            400,
            f"{self._where}.{place} is {shown(value)}; expected {expected}. Send it as the protocol has it.",
        )


def _is_int32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def shown(value: Any) -> str:
    """Format a value for an error message: None as ``missing``, long values truncated."""
    if value is None:
        return "missing"
    if isinstance(value, (dict, list)):
        text = reprlib.repr(value)  # bounded: a body may have many items
    else:
        text = repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
