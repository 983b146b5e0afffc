"""Reading a supervisor's log file, its parts, and the lines of deleted parts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.log_file import parse, printed, read_lines


class Log:
    """Writes and reads a log in the format of a supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_bytes = self.num_lines = 0
        self.parts = [directory / "output.log"]
        self.parts[0].touch()

    def write(self, *texts: str) -> None:
        data = "".join(f"1 o {text}\n" for text in texts)
        with self.parts[-1].open("a") as file:
            file.write(data)
        self.num_bytes += len(data)
        self.num_lines += len(texts)

    def begin_part(self) -> Path:
        self.parts.append(self.directory / f"output.log.{self.num_bytes}.{self.num_lines}")
        self.parts[-1].touch()
        return self.parts[-1]

    def read(self, max_bytes: int = 10**6, offset: int = 0, num_lines: int = 0) -> tuple[list[str], int]:
        """Return all lines from ``offset`` on and the number of lost lines."""
        texts: list[str] = []
        num_lost = 0
        while True:
            read = read_lines(self.directory, offset, max_bytes, num_lines=num_lines)
            num_lines += read.num_lost + len(read.lines)
            num_lost += read.num_lost
            texts += [line.text.rstrip("\n") for line in read.lines]
            if read.end == offset:
                assert not read.has_more
                return texts, num_lost
            offset = read.end


@given(
    texts=st.lists(st.text("abc ", max_size=9), max_size=30),
    ends=st.sets(st.integers(0, 30), max_size=6),
    max_bytes=st.integers(1, 40),
)
def test_read_lines_joins_log_parts(
    tmp_path_factory: object, texts: list[str], ends: set[int], max_bytes: int
) -> None:
    log = Log(tmp_path_factory.mktemp("log"))  # type: ignore[attr-defined]
    for number, text in enumerate(texts):
        if number in ends and number:
            log.begin_part()
        log.write(text)

    assert log.read(max_bytes) == (texts, 0)


def test_read_lines_counts_lines_of_deleted_parts(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write("a", "b")
    middle = log.begin_part()
    log.write("c", "d", "e")
    log.begin_part()
    log.write("f")
    after_c = read_lines(tmp_path, 12, 6, num_lines=2).end
    assert after_c == 18

    middle.unlink()

    assert log.read() == (["a", "b", "f"], 3)
    assert log.read(offset=after_c, num_lines=3) == (["f"], 2)


def test_read_lines_defers_incomplete_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write("a")
    part = log.begin_part()
    part.write_text("1 o b")

    assert log.read() == (["a"], 0)


def test_printed_reads_bounded_head_and_tail(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write("first")
    for _ in range(3):
        log.write(*["x" * 1000] * 10_000)
        log.begin_part()
    log.write("last")

    texts = [text for _, text in printed(tmp_path)]

    assert texts[0] == "first\n"
    assert texts[-1] == "last\n"
    assert 15_000 < len(texts) < 20_000


@pytest.mark.parametrize("time_us", [253402300800000000, 999999999999999999])
def test_parse_future_timestamp_is_clamped_to_now(time_us: int) -> None:
    line = parse(f"{time_us} o text")

    assert 0 < line.time_us <= time.time_ns() // 1000
    assert line.text == "text\n"
