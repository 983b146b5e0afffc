"""Standard streams and exit codes of programs that a node actor runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.ray.node_actor import PIECE_BYTES, NodeActor, environment_of

_WAIT_S = 60.0


class _Programs:
    """A node actor in this process, with helpers that call it."""

    def __init__(self) -> None:
        self.actor = NodeActor()

    def start(self, *words: str) -> int:
        return self.actor.start(words)

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
def test_program_streams_and_exit_code_are_relayed(programs: _Programs) -> None:
    number = programs.start("sh", "-c", "cat; echo bad >&2; exit 7")
    assert programs.actor.write(number, b"one\n")
    assert programs.actor.write(number, b"two\n")
    assert programs.actor.read(number, 30.0)[0] != b""
    programs.actor.end_input(number)
    out, err, code = programs.all_of(number)
    assert (err, code) == (b"bad\n", 7)
    assert out in (b"", b"two\n")


@pytest.mark.process
def test_large_output_is_complete_and_chunked(programs: _Programs) -> None:
    number = programs.start("head", "-c", "5000000", "/dev/zero")
    first = programs.actor.read(number, 30.0)[0]
    assert 0 < len(first) <= PIECE_BYTES
    out, _, code = programs.all_of(number)
    assert (len(first) + len(out), code) == (5_000_000, 0)


@pytest.mark.process
def test_read_honors_timeout_and_shell_exit_codes(programs: _Programs) -> None:
    number = programs.start("cat")
    assert programs.actor.read(number, 0.05) == (b"", b"", None)
    programs.actor.end_input(number)
    assert programs.all_of(number) == (b"", b"", 0)
    assert programs.all_of(programs.start("sh", "-c", "kill $$")) == (b"", b"", 143)
    missing = b"/no/such/python: No such file or directory\n"
    assert programs.all_of(programs.start("/no/such/python")) == (b"", missing, 127)


@pytest.mark.process
def test_program_ignoring_stdin_does_not_block(programs: _Programs) -> None:
    number = programs.start("sh", "-c", "sleep 0.5; exec true")
    began = time.monotonic()
    while programs.actor.write(number, b"x" * PIECE_BYTES):
        assert time.monotonic() < began + _WAIT_S
    assert programs.all_of(number) == (b"", b"", 0)


@pytest.mark.process
def test_abandoned_program_is_not_blocked_by_output(programs: _Programs, tmp_path: Path) -> None:
    done = tmp_path / "done"
    number = programs.start("sh", "-c", f"head -c 5000000 /dev/zero; touch {done}")
    programs.actor.abandon(number)
    programs.actor.abandon(number)
    wait_for(done.exists)


def test_program_environment_combines_ray_start_and_actor_devices() -> None:
    login = {
        "PATH": "/bin", "RAY_ADDRESS": "x", "LD_PRELOAD": "/env/ray/core/libjemalloc.so:/my.so",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }  # fmt: skip
    own = {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2,3", "PATH": "/other"}
    assert environment_of(login, own) == {
        "PATH": "/bin", "LD_PRELOAD": "/my.so", "CUDA_VISIBLE_DEVICES": "2,3",
    }  # fmt: skip
    assert environment_of({"LD_PRELOAD": "/env/ray/core/libjemalloc.so"}, {"CUDA_VISIBLE_DEVICES": ""}) == {}
