"""The interface to ssh, Slurm and Ray: starts a program with pipes on a host."""

from __future__ import annotations

import base64
import dataclasses
import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dstrial.hosts import remote

BEAT_S = 1.0  # between heartbeats of either side
SILENT_S = 5.0  # without a heartbeat: the host is reported
LOST_S = 10.0  # without a heartbeat: the host is lost
LEASE_S = 20.0  # without a heartbeat: a host kills what it runs; longer than the other side waits for it


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be used; ``fix`` is one imperative sentence."""

    got: str
    fix: str


class Transport(Protocol):
    """Starts a program on a host, with the input and output of a local command.

    Attributes:
        connect_s: timeout of the start, seconds.
    """

    connect_s: float

    def words(self, host: str, python: str) -> list[str]:
        """Return the command that runs ``remote.main`` by an interpreter there."""
        ...

    def environment(self) -> Mapping[str, str] | None:
        """Return the command's variables; None for those of this process."""
        ...

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        """Explain why the program has not answered.

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
    """Return the command that runs ``remote.main`` on a host, which may lack dstrial."""
    program = f"import base64,zlib;exec(zlib.decompress(base64.b64decode({_packed_source()!r})))"
    return [python, "-I", "-u", "-c", program]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
