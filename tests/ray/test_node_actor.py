"""Programs that an actor keeps on a node: bytes both ways, how they end, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstrial.ray import guard
from dstrial.ray.node_actor import PIECE_BYTES, NodeActor, environment_of

_GUARD = Path(guard.__file__).read_text()
_WAIT_S = 60.0


class _Programs:
    """An actor in this process, with what a caller does with it."""

    def __init__(self) -> None:
        self.actor = NodeActor(_GUARD)

    def start(self, *words: str) -> int:
        return self.actor.start(words, "01000000")

    def all_of(self, number: int) -> tuple[bytes, bytes, int]:
        out = err = b""
        while True:
            more, also, code = self.actor.read(number, 5.0)
            out, err = out + more, err + also
            if code is not None:
                return out, err, code


@pytest.fixture
def programs() -> _Programs:
    return _Programs()


@pytest.mark.process
def test_a_program_has_its_input_and_output_and_an_exit_code(programs: _Programs) -> None:
    number = programs.start("sh", "-c", "cat; echo bad >&2; exit 7")
    assert programs.actor.write(number, b"one\n")
    assert programs.actor.write(number, b"two\n")
    assert programs.actor.read(number, 30.0)[0] != b""
    programs.actor.end_input(number)
    out, err, code = programs.all_of(number)
    assert (err, code) == (b"bad\n", 7)
    assert out in (b"", b"two\n")


@pytest.mark.process
def test_much_output_comes_whole_and_in_pieces(programs: _Programs) -> None:
    number = programs.start("head", "-c", "5000000", "/dev/zero")
    first = programs.actor.read(number, 30.0)[0]
    assert 0 < len(first) <= PIECE_BYTES
    out, _, code = programs.all_of(number)
    assert (len(first) + len(out), code) == (5_000_000, 0)


@pytest.mark.process
def test_nobody_waits_longer_than_asked_for_output_that_does_not_come(programs: _Programs) -> None:
    number = programs.start("cat")
    assert programs.actor.read(number, 0.05) == (b"", b"", None)
    programs.actor.end_input(number)
    assert programs.all_of(number) == (b"", b"", 0)


@pytest.mark.process
def test_a_signal_that_ends_a_program_is_its_exit_code(programs: _Programs) -> None:
    assert programs.all_of(programs.start("sh", "-c", "kill $$")) == (b"", b"", 143)


@pytest.mark.process
def test_a_program_that_is_not_there_is_named(programs: _Programs) -> None:
    number = programs.start("/no/such/python")
    assert programs.all_of(number) == (b"", b"/no/such/python: No such file or directory\n", 127)


@pytest.mark.process
def test_a_program_that_reads_nothing_holds_up_neither_its_end_nor_others(programs: _Programs) -> None:
    number = programs.start("sh", "-c", "sleep 0.5; exec true")
    began = time.monotonic()
    while programs.actor.write(number, b"x" * PIECE_BYTES):
        assert time.monotonic() < began + _WAIT_S
    assert programs.all_of(number) == (b"", b"", 0)


@pytest.mark.process
def test_who_is_forgotten_has_no_more_input_and_never_waits_for_a_reader(
    programs: _Programs, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    number = programs.start("sh", "-c", f"cat; head -c 5000000 /dev/zero; touch {done}")
    programs.actor.abandon(number)
    programs.actor.abandon(number)
    _wait_until(done.exists)


@pytest.mark.process
def test_what_a_program_leaves_behind_goes_on_until_the_actor_is_gone(tmp_path: Path) -> None:
    # In a session of its own, as supervisors of trials are, and nobody's child any more.
    left = "(setsid sh -c 'echo $$ > pid; exec sleep 600' < /dev/null > /dev/null 2>&1 &)"
    left += "; while [ ! -s pid ]; do sleep 0.01; done"
    with _actor(f"cd {tmp_path}; {left}") as actor:
        assert actor.stdout is not None
        assert actor.stdout.readline() == "0\n"  # the program has ended
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
        actor.kill()
        actor.wait()
    _wait_until(lambda: not Path(f"/proc/{pid}").exists())


@contextlib.contextmanager
def _actor(script: str) -> Iterator[subprocess.Popen[str]]:
    """Give an actor's process that starts a program, prints how it ended, and stays."""
    program = (
        "import sys,time\nfrom dstrial.ray.node_actor import NodeActor\n"
        "k=NodeActor(sys.argv[1])\nn=k.start(['sh','-c',sys.argv[2]],'')\n"
        "while (code:=k.read(n,5.0)[2]) is None: pass\nprint(code,flush=True)\ntime.sleep(600)"
    )
    words = [sys.executable, "-c", program, _GUARD, script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as actor:
        try:
            yield actor
        finally:
            actor.kill()


def test_a_program_has_the_variables_that_ray_was_started_with_and_the_actors_devices() -> None:
    login = {
        "PATH": "/bin", "RAY_ADDRESS": "x", "LD_PRELOAD": "/env/ray/core/libjemalloc.so:/my.so",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }  # fmt: skip
    own = {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2,3", "PATH": "/other"}
    assert environment_of(login, own) == {
        "PATH": "/bin", "LD_PRELOAD": "/my.so", "CUDA_VISIBLE_DEVICES": "2,3",
    }  # fmt: skip
    assert environment_of({"LD_PRELOAD": "/env/ray/core/libjemalloc.so"}, {"CUDA_VISIBLE_DEVICES": ""}) == {}


def _wait_until(condition: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.05)
