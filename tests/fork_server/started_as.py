"""Returns or, as a program, prints whether this process is a fork."""

from __future__ import annotations

from pathlib import Path


def started_as() -> str:
    # The file shows the variables at the time of exec, not those that a fork received.
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    return "a new process" if any(one.startswith(b"RANK=") for one in variables) else "a fork"


if __name__ == "__main__":
    print(started_as())
