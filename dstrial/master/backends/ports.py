"""Ports of an allocation, different from those of every other one that lives."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Collection, Mapping

from dstrial.errors import MasterError

# Determined's first port of each kind.
_FIRST = {
    "C10D_PORT": 29400,
    "DTRAIN_SSH_PORT": 12350,
    "INTER_TRAIN_PROCESS_COMM_PORT_1": 12360,
    "INTER_TRAIN_PROCESS_COMM_PORT_2": 12365,
    "DSTRIAL_DEEPSPEED_PORT": 29500,
}
_TRIES = 2000

TENSORBOARD = {"TENSORBOARD_PORT": 2600}  # as Determined has it


def choose_ports(used: Collection[int], first_ports: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return a free port of its range for each environment variable.

    The search begins at random, so that two masters of one machine hardly ever choose the same port between this check and the
    trial's own bind.

    Args:
        used: ports of other allocations.
        first_ports: environment variable -> first port of its range; those of a trial if left out.
    """
    taken = set(used)
    ports: dict[str, int] = {}
    for variable, first in (_FIRST if first_ports is None else first_ports).items():
        start = random.Random().randrange(_TRIES)  # of no seed that the process was given
        candidates = (first + (start + offset) % _TRIES for offset in range(_TRIES))
        port = next((p for p in candidates if p not in taken and _is_free(p)), None)
        if port is None:
            raise MasterError(
                f"every port from {first} to {first + _TRIES - 1} is in use; expected a free one for {variable}. "
                "End the programs that listen there."
            )
        ports[variable] = port
        taken.add(port)
    return ports


def _is_free(port: int) -> bool:
    with contextlib.ExitStack() as stack:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - a probe
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True
