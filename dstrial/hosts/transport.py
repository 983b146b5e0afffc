"""How a program is started on a host so that it can be asked over its input.

This is the seam between ssh and Slurm.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dstrial.hosts import remote


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be used.

    Attributes:
        got: what is the case.
        fix: one imperative sentence.
    """

    got: str
    fix: str


class Transport(Protocol):
    """Starts a program on a host.

    Its input and output are those of the command that starts it.

    Attributes:
        connect_s: how long that may take, seconds.
    """

    connect_s: float

    def words(self, host: str, python: str) -> list[str]:
        """Return the command that runs ``remote.main`` by an interpreter there."""
        ...

    def environment(self) -> Mapping[str, str] | None:
        """Return the command's variables; None for those of this process."""
        ...

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        """Say why the program has not answered.

        Args:
            host: its name.
            python: path of the interpreter there.
            exit_code: of the command; None while it runs.
            errors: what it has printed.
        """
        ...


@functools.cache
def _packed_source() -> str:
    source = Path(remote.__file__).read_bytes()
    return base64.b64encode(zlib.compress(source, 9)).decode()


def remote_words(python: str) -> list[str]:
    """Return the command that runs ``remote.main`` on a host.

    The host may be without dstrial.
    """
    program = f"import base64,zlib;exec(zlib.decompress(base64.b64decode({_packed_source()!r})))"
    return [python, "-I", "-u", "-c", program]


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
