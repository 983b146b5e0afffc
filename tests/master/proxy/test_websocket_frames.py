"""Frames of WebSockets as the proxy reads and writes them, by the examples of RFC 6455 and for every cut of the bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.utilities import generate_accept_token

from dstrial.master.proxy.websocket_proxy import server_frames

FINAL = 0x80


def masked(first: int, payload: bytes, mask: bytes) -> bytes:
    """Return a frame as a client sends it."""
    size = len(payload)
    head = struct.pack("!BB", first, 0x80 | size) if size < 126 else struct.pack("!BBH", first, 0xFE, size)
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def read(data: bytes, size: int) -> list[Event]:
    frames, found = server_frames(), []
    for start in range(0, len(data), size):
        frames.receive_data(data[start : start + size])
        found += list(frames.events())
    return found


def test_the_handshake_is_that_of_the_standards_example() -> None:
    assert generate_accept_token(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_the_standards_frames_are_read_and_written() -> None:
    assert read(bytes.fromhex("818537fa213d7f9f4d5158"), 100) == [TextMessage("Hello")]
    frames = server_frames()
    assert frames.send(TextMessage("Hello")) == bytes.fromhex("810548656c6c6f")
    assert frames.send(BytesMessage(bytes(256)))[:4] == bytes.fromhex("827e0100")
    assert frames.send(BytesMessage(bytes(65536)))[:10] == bytes.fromhex("827f0000000000010000")


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=4),
    st.lists(st.tuples(st.sampled_from([Ping, Pong]), st.binary(max_size=125)), max_size=4),
    st.binary(min_size=4, max_size=4),
    st.integers(1, 50),
)
def test_frames_are_the_same_however_their_bytes_arrive(
    messages: list[list[bytes]], controls: list[tuple[type[Ping | Pong], bytes]], mask: bytes, size: int
) -> None:
    data, left = b"", list(controls)
    for pieces in messages:
        for idx, piece in enumerate(pieces):
            data += masked((FINAL if idx == len(pieces) - 1 else 0) | (0 if idx else 2), piece, mask)
            if left:
                kind, payload = left.pop(0)
                data += masked(FINAL | (9 if kind is Ping else 10), payload, mask)
    data += masked(FINAL | 8, b"", mask)
    sent = controls[: len(controls) - len(left)]

    found = read(data, size)

    content = b"".join(bytes(event.data) for event in found if isinstance(event, BytesMessage))
    assert content == b"".join(b"".join(pieces) for pieces in messages)
    assert [(type(event), bytes(event.payload)) for event in found if isinstance(event, (Ping, Pong))] == sent
    assert isinstance(found[-1], CloseConnection)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x81\x05Hello", 1002), (b"\xc1\x80abcd", 1002), (b"\x82\xff" + (2**40).to_bytes(8, "big"), 1009)],
    ids=["not masked", "reserved bits", "too large"],
)
def test_what_no_client_may_send_closes_the_websocket(data: bytes, code: int) -> None:
    (event,) = read(data, 100)

    assert isinstance(event, CloseConnection)
    assert event.code == code
