"""The processes of trials and commands: directories, environments, output, ends."""

from dstrial.master.backends.backend import (
    AllocationExit,
    Backend,
    Node,
    RunRef,
    Share,
    SupervisorHandle,
    run_of,
)
from dstrial.master.backends.devices import Slot, find_slots
from dstrial.master.backends.fork_servers import ForkServers, ForkSettings, ShownServer, shown_servers
from dstrial.master.backends.local import (
    LocalBackend,
    begun_checkpoints,
    find,
    is_alive,
    kill,
    poll_exit,
    prepare,
    remove,
    resident_bytes,
    start,
    terminate,
    umask_of_trials,
)
from dstrial.master.backends.ports import choose_ports
from dstrial.master.backends.request import AllocationRequest

__all__ = [
    "AllocationExit",
    "AllocationRequest",
    "Backend",
    "ForkServers",
    "ForkSettings",
    "ShownServer",
    "LocalBackend",
    "Node",
    "RunRef",
    "Share",
    "Slot",
    "SupervisorHandle",
    "begun_checkpoints",
    "choose_ports",
    "find",
    "find_slots",
    "is_alive",
    "kill",
    "poll_exit",
    "prepare",
    "remove",
    "resident_bytes",
    "run_of",
    "shown_servers",
    "start",
    "terminate",
    "umask_of_trials",
]
