"""Says whether this process is a fork; a program and a function."""

from __future__ import annotations

from pathlib import Path


def started_as() -> str:
    # It shows the variables of the program that was executed, not those that a fork was given.
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    return "a new process" if any(one.startswith(b"RANK=") for one in variables) else "a fork"


if __name__ == "__main__":
    print(started_as())
