"""Find, change and add flags in the arguments of an ``HfArgumentParser`` script."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
# Spellings of booleans that `HfArgumentParser` accepts, in lower case.
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")


@dataclasses.dataclass(frozen=True, slots=True)
class GivenFlag:
    """One occurrence of a flag in a command line."""

    word_idx: int  # index of the flag in `CommandLine.words`
    spelling: str  # with its dashes
    value: str | None  # None for a flag without a value
    is_joined: bool  # whether flag and value are one word, joined by `=`


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments of a script, split into words as by a shell."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> CommandLine:
        return cls(tuple(words))

    def find(self, name: str) -> GivenFlag | None:
        """Return the last occurrence of a flag, which argparse uses; None if absent."""
        found = self._all(name)
        return found[-1] if found else None

    def value(self, name: str) -> str | None:
        flag = self.find(name)
        return None if flag is None else flag.value

    def truth(self, name: str) -> bool | None:
        """Return a boolean flag's value; None if the flag is absent or not a boolean.

        A flag without a value is true.
        """
        flag = self.find(name)
        if flag is None:
            return None
        if flag.value is None or flag.value.lower() in _TRUE:
            return True
        return False if flag.value.lower() in _FALSE else None

    def with_value(self, name: str, value: str) -> CommandLine:
        """Return a copy in which the flag's last occurrence has ``value``.

        If the flag is absent, it is added at the end.
        """
        flag = self.find(name)
        words = [*self.words]
        if flag is None:
            end = self._end
            words[end:end] = [f"--{name}", value]
        elif flag.is_joined:
            words[flag.word_idx] = f"{flag.spelling}={value}"
        elif flag.value is None:
            words[flag.word_idx : flag.word_idx + 1] = [flag.spelling, value]
        else:
            words[flag.word_idx + 1] = value
        return CommandLine(tuple(words))

    def without(self, name: str) -> CommandLine:
        words = [*self.words]
        for flag in reversed(self._all(name)):
            num_words = 1 if flag.is_joined or flag.value is None else 2
            del words[flag.word_idx : flag.word_idx + num_words]
        return CommandLine(tuple(words))

    @property
    def _end(self) -> int:
        return self.words.index("--") if "--" in self.words else len(self.words)

    def _all(self, name: str) -> list[GivenFlag]:
        end = self._end
        found = []
        for word_idx, word in enumerate(self.words[:end]):
            if _name(word) != name:
                continue
            spelling, is_joined, joined = word.partition("=")
            following = self.words[word_idx + 1] if word_idx + 1 < end else None
            value = (
                joined if is_joined else following if following is not None and _is_value(following) else None
            )
            found.append(GivenFlag(word_idx, spelling, value, bool(is_joined)))
        return found


def _name(word: str) -> str | None:
    """Return a word's option name with underscores; None if it is no long option."""
    if not word.startswith("--") or len(word) == len("--"):
        return None
    return word[2:].partition("=")[0].replace("-", "_")


def _is_value(word: str) -> bool:
    """Return whether argparse treats the word after an option as its value."""
    return not word.startswith("-") or word == "-" or " " in word or bool(_NEGATIVE_NUMBER.match(word))
