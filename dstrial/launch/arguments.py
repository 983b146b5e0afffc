"""Types of arguments for commands that start ranks. Imports nothing heavy."""

from __future__ import annotations

import argparse


def slots_argument(text: str) -> int:
    """Read ``--slots``, as ``type=`` of an ``argparse`` argument.

    Raises:
        argparse.ArgumentTypeError: it is no integer of at least 1.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"the value is {text!r}; expected an integer of at least 1. Leave --slots out to take the config's."
        )
    return value
