"""The store at ``MASTER_ADDR``, in a process of its own.

For ranks that make their process group without dstrial.
``python -m dstrial.launch.store_process DESCRIPTOR ADDRESS``: the launcher itself imports no torch. A ``TCPStore`` keeps plain
bytes, and listens on loopback here if the job is on one machine. torchrun's rendezvous keeps a pickle in a store on all
interfaces (torch 2.13 ``elastic/rendezvous/dynamic_rendezvous.py:444`` and ``:1126``), so that whoever connects runs code.
"""

from __future__ import annotations

import datetime
import signal
import socket
import subprocess
import sys

from dstrial.ranks.sockets import rendezvous_socket

_TIMEOUT = datetime.timedelta(seconds=900)


class StoreProcess:
    """Serves a store from now until ``close``, or until this process has ended.

    Ranks that connect before torch is imported wait in the socket's backlog.

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
    # The ranks end gracefully after a signal to all processes of a job, and need the store for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener, addr = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    from dstrial.ranks.rendezvous_store import serve_store_on

    _store = serve_store_on(listener, addr, _TIMEOUT)
    sys.stdin.buffer.read()  # until the launcher ends


if __name__ == "__main__":
    main()
