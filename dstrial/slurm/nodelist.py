"""Parses Slurm's lists of nodes and counts of tasks."""

from __future__ import annotations

import itertools
import re

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 65_536  # MAX_RANGE of Slurm's own parser (src/common/hostlist.c)


def expand_nodes(text: str) -> list[str]:
    """Expand a list of nodes: ``gpu[01-03,7]-ib,login`` are five names, in this order.

    Numbers keep their leading zeros; several brackets in a name mean each combination (Slurm's hostlist expressions,
    ``man scontrol``, "show hostnames"). Pure.

    Raises:
        ValueError: it is no such list.
    """
    names: list[str] = []
    for word in _words(text):
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = [_numbers(part, text) if number % 2 else [part] for number, part in enumerate(parts)]
        if any("[" in choice or "]" in choice for choice in itertools.chain(*choices)):
            raise _error(text)
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    if len(names) > _MOST:
        raise _error(text)
    return names


def _words(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(words) != text:
        raise _error(text)
    return words


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _error(whole)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise _error(whole)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _error(text: str) -> ValueError:
    return ValueError(f"{text!r} is no list of Slurm's nodes; expected one like 'host[01-04],gpu7'")


def expand_counts(text: str) -> list[int]:
    """Expand ``4(x2),3`` to 4, 4 and 3 tasks; empty for another text. Pure."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
