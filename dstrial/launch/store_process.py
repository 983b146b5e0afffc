"""Serve the rendezvous store at ``MASTER_ADDR`` from a separate process.

Ranks that create their process group without dstrial need this store. The separate process keeps torch out of the launcher. The
``TCPStore`` contains plain bytes and listens on loopback if the job is on one machine. (torchrun's rendezvous stores a
pickle and listens on all interfaces, so that any client could run code: torch 2.13
``elastic/rendezvous/dynamic_rendezvous.py:444`` and ``:1126``.)

``python -m dstrial.launch.store_process DESCRIPTOR ADDRESS``
"""

from __future__ import annotations

import datetime
import signal
import socket
import subprocess
import sys

from dstrial.ranks.sockets import rendezvous_socket

_TIMEOUT = datetime.timedelta(seconds=900)  # timeout of operations on the store


class StoreProcess:
    """A rendezvous store in a child process, until ``close`` or the parent's exit.

    Ranks that connect before the child has imported torch wait in the socket's backlog.

    Raises:
        RankError: another program has taken the port.
    """

    def __init__(self, addr: str, port: int) -> None:
        with rendezvous_socket(addr, port) as listener:
            self.port = int(listener.getsockname()[1])
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dstrial.launch.store_process", str(descriptor), addr],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    # After a signal to all processes of a job, the ranks still need the store to stop gracefully.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener, addr = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    from dstrial.ranks.rendezvous_store import serve_store_on

    _store = serve_store_on(listener, addr, _TIMEOUT)
    sys.stdin.buffer.read()  # returns when the launcher exits


if __name__ == "__main__":
    main()
