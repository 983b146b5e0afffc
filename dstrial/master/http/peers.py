"""Who is at the other end of a connection, as far as the kernel tells."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from dstrial.errors import MasterError
from dstrial.master.http.sock_diag import Endpoint, SockDiag, open_checked

SCOPE_EXTENSION = "dstrial"
"""Key of a request's ASGI extensions under which its connection tells about its peer."""

_CREDENTIALS = struct.Struct("=iII")
"""``struct ucred``: pid, uid, gid (``linux/socket.h``, unix(7) ``SO_PEERCRED``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who sends the requests of a connection.

    Attributes:
        account: user id of the process that has connected; None where it is not known.
        is_at_owner_socket: whether it has come by the UNIX socket of the state directory, which only the directory's
            owner and root reach.
    """

    account: int | None
    is_at_owner_socket: bool


UNKNOWN = Peer(None, is_at_owner_socket=False)


def peer_of_scope(scope: Mapping[str, Any]) -> Peer:
    """Return the peer of a request, ``UNKNOWN`` where another server than ours serves."""
    extension = (scope.get("extensions") or {}).get(SCOPE_EXTENSION)
    return extension["peer"] if extension is not None else UNKNOWN


def lift_body_deadline(scope: Mapping[str, Any]) -> None:
    """Let the body of a request take as long as it likes."""
    extension = (scope.get("extensions") or {}).get(SCOPE_EXTENSION)
    connection = None if extension is None else extension.get("connection")
    if connection is not None:
        connection.lift_body_deadline()


class Accounts:
    """Decides which accounts of this machine may connect.

    Args:
        allow_others: whether all may; else only the owner of this process and root.

    Raises:
        MasterError: others may not, and the kernel does not tell whose a connection is.
    """

    def __init__(self, *, allow_others: bool) -> None:
        self._allow_others = allow_others
        self.owner = os.geteuid()
        self._diag: SockDiag | None
        try:
            self._diag = open_checked()
        except MasterError:
            if not allow_others:
                raise
            self._diag = None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._diag is not None:
            self._diag.close()

    def is_owner(self, account: int | None) -> bool:
        """Whether it is the account of this process or root."""
        return account is not None and account in (self.owner, 0)

    def peer(self, transport: asyncio.BaseTransport, *, is_at_owner_socket: bool) -> Peer:
        """Return who has connected; asks the kernel, which takes microseconds."""
        if is_at_owner_socket:
            return Peer(_unix_account(transport), is_at_owner_socket=True)
        if self._diag is None:
            return UNKNOWN
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if not peer or not here:
            return UNKNOWN
        account = self._diag.account_of(Endpoint(*peer[:2]), Endpoint(*here[:2]))
        return Peer(account, is_at_owner_socket=False)

    def refusal(self, peer: Peer) -> str | None:
        """Return why a peer may not even try to log in; None if it may."""
        if self.is_owner(peer.account) or (self._allow_others and not peer.is_at_owner_socket):
            return None
        if peer.account is None:
            got = "not known to the kernel, as that of a container with a network of its own"
        else:
            got = f"user id {peer.account}"
        return (
            f"the account of this connection is {got}; expected user id {self.owner}, who runs the master, or root. The "
            "owner may let other accounts log in by `allow_other_users: true` in master.yaml (`dstrial up --config-file`)."
        )


def _unix_account(transport: asyncio.BaseTransport) -> int | None:
    connection = transport.get_extra_info("socket")
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    return int(_CREDENTIALS.unpack(found)[1])
