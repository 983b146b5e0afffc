"""The front door of the master: who may connect, how much a connection may send, and how long it may take."""

from dstrial.master.http.connection import Connection, connection_protocol
from dstrial.master.http.connection_limits import DEFAULT_NUM_CONNECTIONS, Door, Limits
from dstrial.master.http.peers import Accounts, Peer, peer_of_scope

__all__ = [
    "DEFAULT_NUM_CONNECTIONS",
    "Accounts",
    "Connection",
    "Door",
    "Limits",
    "Peer",
    "connection_protocol",
    "peer_of_scope",
]
