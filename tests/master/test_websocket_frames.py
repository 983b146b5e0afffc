"""Frames of WebSockets, by the examples of RFC 6455 and for every cut of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.proxy.frames import BINARY, FrameError, FrameReader, accept_key, frame


def masked(opcode: int, payload: bytes, mask: bytes) -> bytes:
    """Return a frame as a client sends it."""
    head = bytearray(frame(opcode, payload))
    start = len(head) - len(payload)
    head[1] |= 0x80
    return bytes(head[:start]) + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def test_the_handshake_is_that_of_the_standards_example() -> None:
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_the_standards_frames_are_read_and_written() -> None:
    assert FrameReader().feed(bytes.fromhex("818537fa213d7f9f4d5158")) == [(1, b"Hello")]
    assert frame(1, b"Hello") == bytes.fromhex("810548656c6c6f")
    assert frame(BINARY, bytes(256))[:4] == bytes.fromhex("827e0100")
    assert frame(BINARY, bytes(65536))[:10] == bytes.fromhex("827f0000000000010000")


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 8, 9, 10]), st.binary(max_size=300)), max_size=4),
    st.binary(min_size=4, max_size=4),
    st.integers(1, 50),
)
def test_frames_are_the_same_however_their_bytes_arrive(
    messages: list[tuple[int, bytes]], mask: bytes, size: int
) -> None:
    data = b"".join(masked(opcode, payload, mask) for opcode, payload in messages)
    reader = FrameReader()
    found = []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])

    assert found == messages


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x81\x05Hello", 1002), (b"\xc1\x80abcd", 1002), (b"\x82\xff" + (2**40).to_bytes(8, "big"), 1009)],
    ids=["not masked", "reserved bits", "too large"],
)
def test_what_no_client_may_send_closes_the_websocket(data: bytes, code: int) -> None:
    with pytest.raises(FrameError) as caught:
        FrameReader().feed(data)

    assert caught.value.code == code
