"""Reading a supervisor's log file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.log_file import parse, printed, read_lines


def write(directory: Path, *texts: str) -> None:
    with (directory / "output.log").open("a") as file:
        file.write("".join(f"1 o {text}\n" for text in texts))


def read(directory: Path, max_bytes: int) -> list[str]:
    texts: list[str] = []
    offset = 0
    while (found := read_lines(directory, offset, max_bytes)).end > offset:
        texts += [line.text.rstrip("\n") for line in found.lines]
        offset = found.end
    assert not found.has_more
    return texts


@given(texts=st.lists(st.text("abc ", max_size=9), max_size=30), max_bytes=st.integers(1, 40))
def test_read_lines_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], max_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("log")
    assert read(directory, max_bytes) == []
    write(directory, *texts)

    assert read(directory, max_bytes) == texts


def test_read_lines_defers_incomplete_line(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with (tmp_path / "output.log").open("a") as file:
        file.write("1 o b")

    assert read(tmp_path, 1000) == ["a"]


def test_printed_reads_bounded_head_and_tail(tmp_path: Path) -> None:
    write(tmp_path, "first", *["x" * 1000] * 30_000, "last")

    texts = [text for _, text in printed(tmp_path)]

    assert texts[0] == "first\n"
    assert texts[-1] == "last\n"
    assert 15_000 < len(texts) < 20_000


@pytest.mark.parametrize("time_us", [253402300800000000, 999999999999999999])
def test_parse_future_timestamp_is_clamped_to_now(time_us: int) -> None:
    line = parse(f"{time_us} o text")

    assert 0 < line.time_us <= time.time_ns() // 1000
    assert line.text == "text\n"
