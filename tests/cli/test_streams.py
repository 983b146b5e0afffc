from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstrial.cli.streams import LastingStream


def test_a_stream_without_a_reader_goes_silent() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = LastingStream(file)
        stream.write("read\n")
        assert os.read(reader, 100) == b"read\n"
        assert not stream.is_lost
        os.close(reader)
        assert stream.write("not read\n") == len("not read\n")
        assert stream.is_lost
        file.write("by somebody else\n")
        file.flush()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Requires: [/dev/full]")
def test_a_stream_to_a_full_disk_goes_silent() -> None:
    with open("/dev/full", "w") as file:
        stream = LastingStream(file)
        stream.write("lost\n")
        assert stream.is_lost
