"""Asks the kernel whose the other end of a TCP connection of this machine is.

Source: Linux ``include/uapi/linux/inet_diag.h`` (``struct inet_diag_req_v2``, ``inet_diag_sockid``, ``inet_diag_msg``),
``sock_diag.h`` (``SOCK_DIAG_BY_FAMILY``) and ``netlink.h`` (``struct nlmsghdr``); sock_diag(7).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import struct

from dstrial.errors import MasterError

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NO_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF

_HEADER = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence number, port id."""
_REQUEST = struct.Struct("=BBBxI")
"""``inet_diag_req_v2`` up to its ``inet_diag_sockid``: family, protocol, extensions, states."""
_PORTS = struct.Struct("!HH")
_ANSWER = struct.Struct("=BBBB")
"""``inet_diag_msg`` up to its ``inet_diag_sockid``: family, state, timer, retransmits."""
_TAIL = struct.Struct("=IIIII")
"""``inet_diag_msg`` behind its ``inet_diag_sockid``: expires, receive queue, send queue, uid, inode."""
_SOCKID_BYTES = 48
_INTERFACE_AND_COOKIE = struct.Struct("=III")

_MAPPED = b"\0" * 10 + b"\xff\xff"
"""What an IPv6 address begins with that stands for an IPv4 one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a TCP connection.

    Attributes:
        host: a numeric address, IPv4 or IPv6.
        port: the TCP port.
    """

    host: str
    port: int


class SockDiag:
    """A connection to the kernel's ``sock_diag`` for a single thread, to be closed.

    The kernel answers while it is asked (``netlink_unicast`` runs the handler in the sender), so that nothing waits.

    Raises:
        MasterError: the kernel or a sandbox does not offer it.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
            )
        except OSError as error:
            raise _unavailable(error.strerror or str(error)) from error
        self._socket.setblocking(False)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def account_of(self, peer: Endpoint, here: Endpoint) -> int | None:
        """Return the user id that holds a peer's end of an open connection.

        Args:
            peer: the other end, as ``getpeername`` gives it.
            here: this end, as ``getsockname`` gives it.

        Returns:
            None where it is not known: the peer has closed its socket, or is not in this network namespace.
        """
        family, source, destination = _addresses(peer.host, here.host)
        number = next(self._numbers) & 0xFFFFFFFF
        body = b"".join(
            (
                _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES),
                _PORTS.pack(peer.port, here.port),
                source.ljust(16, b"\0"),
                destination.ljust(16, b"\0"),
                _INTERFACE_AND_COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE),
            )
        )
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, number, 0)
        try:
            # To the kernel by name: a netlink socket takes messages from other programs, too.
            self._socket.sendto(header + body, (0, 0))
            while True:
                answer, (sender, _groups) = self._socket.recvfrom(8192)
                if sender == 0 and len(answer) >= _HEADER.size and _HEADER.unpack_from(answer)[3] == number:
                    break
        except OSError:
            return None
        return _read_account(answer, peer.port, here.port, source, destination)


def _addresses(peer: str, here: str) -> tuple[int, bytes, bytes]:
    """Return family and both addresses as the kernel has them; IPv4 in IPv6 is IPv4."""
    if ":" not in peer:
        return socket.AF_INET, socket.inet_pton(socket.AF_INET, peer), socket.inet_pton(socket.AF_INET, here)
    # A zone (fe80::1%eth0) is no part of the address.
    both = [socket.inet_pton(socket.AF_INET6, host.partition("%")[0]) for host in (peer, here)]
    if all(address.startswith(_MAPPED) for address in both):
        return socket.AF_INET, both[0][12:], both[1][12:]
    return socket.AF_INET6, both[0], both[1]


def _read_account(
    answer: bytes, peer_port: int, here_port: int, source: bytes, destination: bytes
) -> int | None:
    """Return the uid of an answer about exactly this connection with a held socket."""
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # NLMSG_ERROR: there is no such socket here
    position = _HEADER.size + _ANSWER.size
    if len(answer) < position + _SOCKID_BYTES + _TAIL.size:
        return None
    size = len(source)
    # Where the connection is gone the kernel takes a socket that listens at its address, which may be another account's
    # (inet_diag_find_one_icsk, __inet_lookup).
    if _PORTS.unpack_from(answer, position) != (peer_port, here_port):
        return None
    at_source, at_destination = position + 4, position + 20
    if answer[_HEADER.size] == socket.AF_INET6 and size == 4:
        # The peer's own socket is an IPv6 one that speaks IPv4.
        at_source, at_destination = (
            _behind_mapping(answer, at_source),
            _behind_mapping(answer, at_destination),
        )
    if (
        answer[at_source : at_source + size] != source
        or answer[at_destination : at_destination + size] != destination
    ):
        return None
    *_, uid, inode = _TAIL.unpack_from(answer, position + _SOCKID_BYTES)
    # A socket that no process holds any more, TIME_WAIT among them, has uid 0 and inode 0, and is nobody's.
    return int(uid) if inode != 0 else None


def _behind_mapping(answer: bytes, position: int) -> int:
    return position + 12 if answer[position : position + 12] == _MAPPED else position


def _unavailable(got: str) -> MasterError:
    return MasterError(
        f"the account of a connection cannot be asked of the kernel (sock_diag: {got}); expected Linux with INET_DIAG and a "
        "sandbox that allows netlink. Write `allow_other_users: true` into master.yaml (--config-file) to let every account "
        "of this machine try to log in."
    )


def open_checked() -> SockDiag:
    """Return a :class:`SockDiag` that has been tried on a connection of this process.

    Raises:
        MasterError: it does not work here.
    """
    import os

    diag = SockDiag()
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            there, _ = server.accept()
            with contextlib.closing(there):
                found = diag.account_of(Endpoint(*client.getsockname()), Endpoint(*server.getsockname()))
    except OSError as error:
        diag.close()
        raise _unavailable(error.strerror or str(error)) from error
    if found != os.geteuid():
        diag.close()
        raise _unavailable(f"says user id {found} of a connection of user id {os.geteuid()}")
    return diag
