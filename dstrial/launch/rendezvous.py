"""How the launchers of a job agree on its ranks, without unpickling anything.

torchrun's ``c10d`` backend keeps its state as a pickle in a ``TCPStore`` on all interfaces (torch 2.13
``elastic/rendezvous/dynamic_rendezvous.py:444`` and ``:1126``), so whoever can connect runs code in the launcher. A launcher
alone needs to agree with nobody. Several agree through a ``TCPStore`` in which the elastic agent keeps plain JSON.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from dstrial.ranks.identity import LOOPBACK_ADDR
from dstrial.ranks.rendezvous_store import serve_store
from dstrial.ranks.sockets import free_port

if TYPE_CHECKING:
    from dstrial.launch.agent import Placement

_TIMEOUT = datetime.timedelta(seconds=900)
# torch exports its stores without saying so.
_stores = vars(torch.distributed)


class Rendezvous(RendezvousHandler):  # type: ignore[misc]  # mypy does not follow torch.distributed.elastic
    """The launchers of one job, as the elastic agent asks for them.

    ``serves_store`` says whether ranks may look for a store at ``MASTER_ADDR`` and ``MASTER_PORT``. Several launchers always have
    one, which the first serves.
    """

    def __init__(self, placement: Placement, run_id: str, *, serves_store: bool) -> None:
        self._placement = placement
        self._run_id = run_id
        self._is_alone = placement.num_nodes == 1
        self._has_store = serves_store or not self._is_alone
        self._store: Any = None
        addr, port = placement.master_addr, placement.master_port
        if self._is_alone:
            addr = LOOPBACK_ADDR
        if self._has_store and (self._is_alone or placement.node_rank == 0):
            self._store = serve_store(addr, port, _TIMEOUT)
            port = self._store.port
        self.master_addr = addr
        """Where ranks find rank 0's machine."""
        self.master_port = port or free_port()
        """Port of the ranks' store; of nothing yet if none is served."""

    def get_backend(self) -> str:
        return "dstrial"

    @property
    def use_agent_store(self) -> bool:
        """Whether ``env://`` in the ranks asks a store that is served here."""
        return self._has_store

    def next_rendezvous(self) -> RendezvousInfo:
        told = RendezvousStoreInfo(self.master_addr, self.master_port)
        if self._is_alone:
            return RendezvousInfo(_stores["HashStore"](), 0, 1, told)
        if self._store is None:
            self._store = _stores["TCPStore"](
                self.master_addr,
                self.master_port,
                is_master=False,
                timeout=_TIMEOUT,
                wait_for_workers=False,
            )
        shared = _stores["PrefixStore"](self._run_id, self._store)
        return RendezvousInfo(shared, self._placement.node_rank, self._placement.num_nodes, told)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True
