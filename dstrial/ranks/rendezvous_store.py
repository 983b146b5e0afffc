"""Open the store with which the ranks of a job create their process group.

Values in the store are never unpickled. Ranks of ``dstrial.launch`` on one machine use a private ``FileStore``. A
single rank needs no shared store. Other jobs use a ``TCPStore``, which listens on loopback if the job is on one machine.
(torch's ``env://`` always listens on all interfaces: torch 2.13 ``rendezvous.py:_create_c10d_store``.)
"""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed
from packaging.version import Version
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from dstrial.errors import RankTimeoutError
from dstrial.ranks.identity import LOOPBACK_ADDR, RankIdentity
from dstrial.ranks.job_secret import private_path
from dstrial.ranks.sockets import rendezvous_socket

_SCHEME = "dstrial"  # of the URLs that ``as_init_method`` returns
_POLL_S = 0.01  # interval of checks whether all ranks have connected
# torch's type stubs do not export its stores.
_stores = vars(torch.distributed)

_group_numbers = itertools.count()
# (store, rank, world size) by the number in the URL of ``as_init_method``, until the URL is used.
_opened: dict[str, tuple[Any, int, int]] = {}
# Stores are served until the process exits, because other ranks may use them after this rank has left its group.
_served: dict[tuple[str, int], Any] = {}

# With libuv, torch 2.6 listens on all interfaces and rejects an existing socket; torch 2.13 accepts one. Older releases
# get ``use_libuv=False``.
_LIBUV_TAKES_SOCKETS = Version(torch.__version__) >= Version("2.13")


def open_store(identity: RankIdentity, *, timeout_s: float) -> Any:
    """Return a new ``torch.distributed`` store that all ranks share.

    Waits until all ranks have connected.

    Raises:
        RankTimeoutError: a rank did not connect in time; the message names the missing ranks.
        RankError: rank 0's port is taken.
        torch.distributed.DistNetworkError: rank 0 cannot be reached.

    Ranks: all, collectively.
    """
    number = next(_group_numbers)
    give_up_at_s = time.monotonic() + timeout_s
    path = private_path(os.environ, identity)
    if identity.world_size == 1:
        return _stores["HashStore"]()
    if path is not None:
        # The last rank to leave deletes the file, so every group has a separate file.
        store = _stores["FileStore"](f"{path}-{number}", identity.world_size)
    else:
        store = _stores["PrefixStore"](f"dstrial-{number}", _tcp_store(identity, timeout_s))
    _await_all(store, identity, give_up_at_s, timeout_s)
    return store


def as_init_method(store: Any, identity: RankIdentity) -> str:
    """Return a single-use URL that ``init_process_group`` resolves to ``store``.

    Pass the URL as ``init_method``, because DeepSpeed's ``init_distributed`` has no argument for a store (0.19.8
    ``comm/comm.py:844``).
    """
    number = str(len(_opened))
    _opened[number] = (store, identity.rank, identity.world_size)
    return f"{_SCHEME}://{number}"


def meet_privately(identity: RankIdentity) -> None:
    """Make torch's ``env://`` rendezvous use the store of :func:`open_store`.

    User code can then create the process group itself. The launcher of one machine's ranks serves no store at
    ``MASTER_PORT``, which torch would use. A no-op if the job has several ranks and no private rendezvous file. A rendezvous
    for another world size is still torch's.
    """
    if identity.world_size > 1 and private_path(os.environ, identity) is None:
        return

    handler_of_torch = _rendezvous_handlers["env"]

    def handler(
        url: str, timeout: datetime.timedelta = default_pg_timeout, **kwargs: Any
    ) -> Iterator[tuple[Any, int, int]]:
        (num_ranks,) = parse_qs(urlparse(url).query).get("world_size", [str(identity.world_size)])
        if int(num_ranks) != identity.world_size:  # the user's own group, not the job's
            yield from handler_of_torch(url, timeout=timeout, **kwargs)
            return
        yield open_store(identity, timeout_s=timeout.total_seconds()), identity.rank, identity.world_size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")

    _rendezvous_handlers["env"] = handler


def _handed_over(url: str, **_kwargs: Any) -> Iterator[Any]:
    yield _opened.pop(url.removeprefix(f"{_SCHEME}://").partition("?")[0])
    raise RuntimeError(f"Unable to perform re-rendezvous using {_SCHEME}:// method")


if _SCHEME not in _rendezvous_handlers:
    register_rendezvous_handler(_SCHEME, _handed_over)  # type: ignore[no-untyped-call]


def _tcp_store(identity: RankIdentity, timeout_s: float) -> Any:
    addr, port = identity.master_addr, identity.master_port
    tcp_store = _stores["TCPStore"]
    timeout = datetime.timedelta(seconds=timeout_s)
    is_served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_served_by_agent:
        if identity.num_nodes == 1:
            addr = LOOPBACK_ADDR
        if identity.rank == 0:
            if (addr, port) not in _served:
                with rendezvous_socket(addr, port) as listener:
                    _served[addr, port] = serve_store_on(listener, addr, timeout)
            return _served[addr, port]
    return tcp_store(addr, port, is_master=False, timeout=timeout, wait_for_workers=False)


def serve_store_on(listener: socket.socket, addr: str, timeout: datetime.timedelta) -> Any:
    """Return a ``TCPStore`` that this process serves on a listening socket."""
    options = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if not _LIBUV_TAKES_SOCKETS:
        options["use_libuv"] = False
    # The store takes ownership of the descriptor.
    port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    return _stores["TCPStore"](addr, port, master_listen_fd=descriptor, **options)


def _await_all(store: Any, identity: RankIdentity, give_up_at_s: float, timeout_s: float) -> None:
    names = {rank: f"here/{rank}" for rank in range(identity.world_size)}
    store.set(names[identity.rank], "1")
    missing = list(names)
    while missing:
        missing = [rank for rank in missing if not store.check([names[rank]])]
        if missing and time.monotonic() > give_up_at_s:
            who = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            raise RankTimeoutError(
                f"the rendezvous has waited {timeout_s:g} s for all {identity.world_size} ranks and is still without {who} "
                f"(this is rank {identity.rank}); expected every rank to arrive. Look at the output of {who}."
            )
        if missing:
            time.sleep(_POLL_S)
