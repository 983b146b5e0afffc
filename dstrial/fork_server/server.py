"""The fork server's process: import modules, then fork a spare for each request.

``python -m dstrial.fork_server.server SOCKET MODULES...``

The server has one thread, runs no tensor operation, and ends when its parent closes the socket or ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dstrial import collector
from dstrial.fork_server import NVML_CHECK_VARIABLE, fork, pythonpath_of


def main(words: Sequence[str]) -> None:
    """Run the fork server; ``words`` are a socket's descriptor and names of modules.

    The server imports the modules, sends the result on the socket, and then forks a spare for each request.
    """
    descriptor = int(words[0])
    os.set_inheritable(descriptor, False)
    atexit.register(fork.end_without_teardown)  # registered first, so that it runs last
    before = dict(os.environ)
    # DeepSpeed's import sets it, too. Querying devices through NVML leaves the process safe to fork.
    os.environ[NVML_CHECK_VARIABLE] = "1"
    # site.py leaves duplicates out of sys.path.
    places = set(map(os.path.abspath, pythonpath_of(os.environ)))
    path = [place for place in sys.path[1:] if place not in places]
    problem = ""
    with collector.paused_for_good():
        try:
            for name in words[1:]:
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a new process reports the error
            problem = f"{name}: {type(error).__name__}: {error}"
    origin = fork.Origin(
        added={name: value for name, value in os.environ.items() if before.get(name) != value},
        path=path,
        descriptors=frozenset(fork.open_descriptors() - {descriptor}),
        versions=fork.imported_versions(),
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server ends when its parent closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    fork.reply(descriptor, problem or _unforkable())
    while request := os.read(descriptor, 1):
        fork.send_spare(descriptor, origin, is_adopted=request == fork.CHILD)
    os._exit(0)


def _unforkable() -> str:
    """Return why this process cannot be forked safely; "" if it can.

    Locks that other threads hold stay locked in a fork; the CUDA driver does not work in a fork.
    """
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        return f"it has {num_threads} threads"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if "libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8") or (
        cuda and cuda.is_initialized()
    ):
        return "it has used an accelerator"
    return ""


if __name__ == "__main__":
    gc.enable()
    main(sys.argv[1:])
