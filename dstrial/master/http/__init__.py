"""The master's front door: who may connect, send how much, and for how long."""

from dstrial.master.http.connection import Connection, connection_protocol
from dstrial.master.http.connection_limits import DEFAULT_NUM_CONNECTIONS, ConnectionLimiter, Limits
from dstrial.master.http.peers import Accounts, Peer, peer_of_scope

__all__ = [
    "DEFAULT_NUM_CONNECTIONS",
    "Accounts",
    "Connection",
    "ConnectionLimiter",
    "Limits",
    "Peer",
    "connection_protocol",
    "peer_of_scope",
]
