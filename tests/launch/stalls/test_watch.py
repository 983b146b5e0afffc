"""StallWatch with real rank processes that write heartbeats and stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.launch.stalls.diagnosis import StallSettings
from dstrial.launch.stalls.watch import StallWatch, WatchedRanks
from dstrial.process_state import read_state
from dstrial.ranks.heartbeat import HEARTBEAT_VARIABLE, make_heartbeat_file, read_beat
from dstrial.ranks.stack_dump import STACKS_FILE_VARIABLE

pytestmark = pytest.mark.process

# Program of a rank. Each line of standard input sets its heartbeat: a batch number, `end` (training has ended) or `leave`
# (the program has ended, but a thread goes on).
RANK = """
import sys
import threading
from dstrial.ranks.heartbeat import heartbeat, leave
from dstrial.ranks.stack_dump import dump_stacks_on_signal
dump_stacks_on_signal()
beat = heartbeat()
def read_records():
    return sys.stdin.readline().strip()
while word := read_records():
    if word == "leave":
        threading.Thread(target=read_records, name="reader").start()
        leave()
        print(word, flush=True)
        break
    beat.end() if word == "end" else beat.begin_batch(int(word))
    print(word, flush=True)
"""


class Ranks:
    """Two rank processes and a StallWatch whose clock the test advances."""

    def __init__(self, directory: Path, settings: StallSettings) -> None:
        self.lines: list[str] = []
        self.ended: list[int | None] = []
        self.ended_slots: list[int] = []
        self.now_s = 0.0
        beats = make_heartbeat_file(directory / "heartbeats", 2)
        files = {rank: directory / f"{rank}.stacks" for rank in range(2)}
        (directory / "rank.py").write_text(RANK)
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(directory / "rank.py")],
                env={
                    **os.environ,
                    HEARTBEAT_VARIABLE: f"{rank}:{directory / 'heartbeats'}",
                    STACKS_FILE_VARIABLE: str(files[rank]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        watched = WatchedRanks(beats, {0: 0, 1: 1}, files, directory / "kept")
        self.watch = StallWatch(
            watched,
            settings,
            self.lines.append,
            lambda rank, _: self.ended.append(rank),
            self.ended_slots.append,
            lambda: self.now_s,
        )
        wait_for(lambda: all(read_beat(beats, slot) for slot in range(2)))

    def say(self, rank: int, word: str) -> None:
        process = self.processes[rank]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(word + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == word + "\n"

    def train(self, *batches: int) -> None:
        for batch in batches:
            self.say(0, str(batch))
            self.say(1, str(batch))
            self.pass_time(1.0)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.watch.poll()

    def close_input(self, rank: int) -> None:
        process = self.processes[rank]
        process.communicate()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(**settings: object) -> Ranks:
        made.append(Ranks(tmp_path, StallSettings(**settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_stall_is_reported_with_all_stacks(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    both = ranks(timeout_s=20.0)
    both.train(0, 1, 2)
    both.pass_time(15)
    assert both.lines == []
    both.pass_time(15)
    assert both.lines[0].startswith("stalled: rank 0 is at batch 2 in train_batch, in read_records (rank.py:")
    assert any("in read_records" in line for line in both.lines)
    assert "read_records" in (tmp_path / "kept" / "rank_1.stacks.txt").read_text()
    assert both.ended == []
    both.train(3)
    assert both.lines[-1] == "stalled: no longer; training is at batch 3"


@pytest.mark.parametrize("last_words", [(), ("end",)], ids=["killed", "ended"])
@pytest.mark.parametrize("trained", [(), ("3", "4")], ids=["stalled", "trained"])
def test_only_progress_before_exit_is_recovery(
    ranks: Callable[..., Ranks], trained: tuple[str, ...], last_words: tuple[str, ...]
) -> None:
    both = ranks(timeout_s=20.0)
    both.train(0, 1, 2)
    both.pass_time(30)
    assert both.lines
    for word in (*trained, *last_words):
        both.say(0, word)
        both.say(1, word)
    both.close()
    both.watch.close()
    assert [line for line in both.lines if "no longer" in line] == [
        "stalled: no longer; training is at batch 4" for _ in trained[:1]
    ]


def test_stopped_rank_is_reported_early_with_backoff(ranks: Callable[..., Ranks]) -> None:
    both = ranks(timeout_s=2000.0)
    both.train(0, 1, 2)
    pid = both.processes[1].pid
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: getattr(read_state(pid), "is_stopped", False))
    both.pass_time(12)
    assert both.lines[0].startswith(
        "stalled: rank 1 is stopped (SIGSTOP) at batch 2 in train_batch; rank 0 is"
    )
    both.pass_time(500)
    assert len([line for line in both.lines if "is stopped" in line]) == 6  # at 10, 20, 40, 80, 160 and 320 s
    os.kill(pid, signal.SIGCONT)
    both.train(3, 4)
    assert both.lines[-1] == "stalled: no longer; training is at batch 3"


def test_time_launcher_was_stopped_does_not_count(ranks: Callable[..., Ranks]) -> None:
    both = ranks(timeout_s=20.0)
    both.train(0, 1, 2)
    both.now_s += 3600
    both.watch.poll()
    both.pass_time(10)
    assert both.lines == []


def test_restart_action_ends_ranks_once_after_first_batch(ranks: Callable[..., Ranks]) -> None:
    both = ranks(timeout_s=5.0, action="restart")
    both.train(0)
    both.pass_time(35)  # less than eight timeouts
    assert both.ended == []
    assert both.lines[0].startswith("slow: rank")
    assert "no batch has ended so far" in both.lines[0]
    both.train(1, 2)
    both.pass_time(200)
    assert both.ended == [None]


def test_rank_lingering_after_program_end_is_ended_once(ranks: Callable[..., Ranks]) -> None:
    both = ranks(timeout_s=20.0)
    both.train(0, 1)
    for rank in range(2):
        both.say(rank, "leave")
    both.close_input(0)
    both.pass_time(60)
    assert (both.lines, both.ended_slots) == ([], [])
    both.pass_time(60)
    assert both.ended_slots == [1]
    assert both.lines[0].startswith(
        "warning: rank 1 has not ended 60 s after its program: its threads are in read_records (rank.py:"
    )
    assert both.ended == []
