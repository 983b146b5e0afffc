"""Training over machines: the same bits as on one, and every failure named by host, soon, with nothing left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from hosts_runs import CONFIG, ENVIRON, copy_into, losses
from machines import Machine, Machines, machines
from waiting import wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
_SOON_S = 60.0


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    """Two machines that tests leave as they are."""
    with machines(2) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with the trial, its config and a hostfile of two machines."""
    copy_into(tmp_path, "small_trial.py", "small_pipeline.py")
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    return tmp_path


class _Program:
    """A command of dstrial's on a machine, whose lines are read as they come."""

    def __init__(
        self, machine: Machine, place: Path, *words: str, environ: dict[str, str] | None = None
    ) -> None:
        self._log = place / "printed.log"
        variables = [f"{name}={value}" for name, value in {**ENVIRON, **(environ or {})}.items()]
        with self._log.open("wb") as log:
            self._process = machine.popen(
                ["env", *variables, sys.executable, "-m", *words],
                cwd=place, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, words: str, within_s: float = _SOON_S) -> float:
        """Wait until it prints words; return how long that took, seconds."""
        began_s = time.monotonic()
        while words not in self.text:
            assert time.monotonic() - began_s < within_s, f"{words!r} is not in:\n{self.text}"
            assert self._process.poll() is None or words in self.text, (
                f"it ended without {words!r}:\n{self.text}"
            )
            time.sleep(0.05)
        return time.monotonic() - began_s

    def end(self, within_s: float = _SOON_S) -> tuple[int, str]:
        """Wait for its end; return its exit code and what it printed."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"it has not ended in {within_s} s:\n{self.text}") from None
        return code, self.text


def _run(machine: Machine, place: Path, *flags: str, pause_s: float = 0.1) -> _Program:
    words = ["run", "exp.yaml", ".", "--no-progress", "--hostfile", "hosts"]
    settings = ["--config", f"hyperparameters.pause_s={pause_s}"]
    return _Program(machine, place, "dstrial.cli", *words, *settings, *flags)


def _nothing_is_left(made: Machines, within_s: float) -> None:
    give_up_at_s = time.monotonic() + within_s
    while left := made.processes():
        assert time.monotonic() < give_up_at_s, left
        time.sleep(0.2)


def _wait_for_batches(program: _Program) -> None:
    program.wait_for("saved checkpoint")


def _wait_for_more(program: _Program) -> None:
    num_losses = len(losses(program.text))
    wait_for(lambda: len(losses(program.text)) > num_losses, program.text)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["hyperparameters.zero_stage=3"], id="zero 3"),
        pytest.param(
            ["entrypoint=small_pipeline:SmallPipeline", "data.dstrial.pipeline_stages=2"], id="pipeline"
        ),
    ],
)
def test_two_hosts_compute_the_bits_of_one_machine(
    two: Machines, place: Path, settings: Sequence[str]
) -> None:
    overrides = [word for setting in settings for word in ("--config", setting)]
    found = {}
    for name, lines in (("one", "host1 slots=2\n"), ("two", "host1 slots=1\nhost2 slots=1\n")):
        (place / "hosts").write_text(lines)
        code, text = _run(two[1], place, *overrides, pause_s=0.0).end()
        assert code == 0, text
        found[name] = losses(text)
    assert len(found["one"]) == 4
    assert found["two"] == found["one"]
    assert two.processes() == {}


def test_code_travels_to_a_host_that_does_not_see_it(place: Path) -> None:
    with machines(2) as two:
        code_there = place / "code"
        code_there.mkdir()
        for name in ("small_trial.py", "exp.yaml", "hosts"):
            (place / name).rename(code_there / name)
        two[2].hide(code_there)
        before = set(Path("/tmp").glob("dstrial-node-*/context"))
        program = _Program(
            two[1], code_there, "dstrial.launch", "--hostfile", "hosts", "--trial", "small_trial:SmallTrial",
            "--config", "exp.yaml", environ={"DSTRIAL_RUNS_DIR": str(place / "runs"), "LINES": "two\nlines"},
        )  # fmt: skip
        code, text = program.end()
        assert code == 0, text
        assert len(losses(text)) == 4
        assert two[2].run(["ls", str(code_there)], cwd="/").stdout == ""
        assert set(Path("/tmp").glob("dstrial-node-*/context")) <= before


def test_a_script_runs_on_every_slot_and_the_secret_on_no_command_line(two: Machines, place: Path) -> None:
    (place / "script.py").write_text(
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"
        "assert len(os.environ['DSTRIAL_SECRET']) == 64 and os.environ['GLOO_SOCKET_IFNAME'] == 'eth0'\n"
        "words = [open(f'/proc/{pid}/cmdline').read() for pid in os.listdir('/proc') if pid.isdigit()]\n"
        "assert not any(os.environ['DSTRIAL_SECRET'] in one for one in words)\n"
    )
    code, text = _Program(
        two[1], place, "dstrial.launch", "--hostfile", "hosts", "script.py", "--a", "b c"
    ).end()
    assert code == 0, text
    assert "[rank=0] rank 0 of 2 ['--a', 'b c']" in text
    assert "[rank=1] rank 1 of 2 ['--a', 'b c']" in text


def test_a_rank_that_fails_is_named_with_its_host_and_its_error(two: Machines, place: Path) -> None:
    program = _run(two[1], place, "--config", "searcher.max_length.batches=400", "--config", "max_restarts=0")
    _wait_for_batches(program)
    (place / "fail-host2").touch()
    code, text = program.end()
    (place / "fail-host2").unlink()
    assert code == 1, text
    assert "rank 1 failed first (exit code 1, host host2)" in text
    assert "ValueError: asked to fail" in text
    _nothing_is_left(two, 5)


def test_a_cut_that_heals_ends_nothing_and_without_a_host_the_others_go_on(place: Path) -> None:
    with machines(2) as two:
        program = _run(two[1], place, "--config", "searcher.max_length.batches=200")
        _wait_for_batches(program)
        two[2].cut()
        time.sleep(4)
        two[2].heal()
        _wait_for_more(program)
        assert "restart" not in program.text
        two[2].cut()
        assert program.wait_for("host2 (rank 1, last seen at batch ") < 15
        assert program.wait_for("host host2 was lost: ") < 10
        assert program.wait_for("restart 1 of 2 on host1, from checkpoint ") < 15
        code, text = program.end(100)
        assert code == 0, text
        assert "completed at batch 200 of 200" in text
        assert re.search("without host2, which is (unreachable|silent) ", text)  # silent on a busy machine
        _nothing_is_left(two, 25)  # the host that was cut off ends its ranks by itself


def test_a_stopped_rank_is_named_and_a_killed_launcher_ends_the_attempt_at_once(
    two: Machines, place: Path
) -> None:
    program = _run(two[1], place, "--config", "searcher.max_length.batches=100")
    _wait_for_batches(program)
    rank = two[2].find("dstrial.launch.rank_main")
    assert rank is not None
    two[2].signal(rank, signal.SIGSTOP)
    program.wait_for("host2: stalled: rank 1 is stopped (SIGSTOP) at batch ")
    two[2].signal(rank, signal.SIGCONT)
    _wait_for_more(program)
    assert "restart" not in program.text
    launcher = two[2].find("dstrial.launch.node")
    assert launcher is not None
    two[2].signal(launcher, signal.SIGKILL)
    assert program.wait_for("host host2 was lost: its launcher was killed by signal 9") < 10
    assert program.wait_for("restart 1 of 2 on host1, host2, from checkpoint ") < 15
    code, text = program.end(100)
    assert code == 0, text
    assert "completed at batch 100 of 100" in text
    _nothing_is_left(two, 5)


def test_nothing_outlives_the_command_that_was_killed(two: Machines, place: Path) -> None:
    program = _run(two[1], place, "--config", "searcher.max_length.batches=4000")
    _wait_for_batches(program)
    pid = two[1].find("dstrial.cli", "run")
    assert pid is not None
    two[1].signal(pid, signal.SIGKILL)
    program.end()
    _nothing_is_left(two, 30)
    assert len(list(place.glob("runs/*/*/checkpoints/*"))) >= 2, (
        "the ranks were asked to stop with a checkpoint"
    )


def test_ctrl_c_stops_all_hosts_at_the_same_batch_and_resume_goes_on(two: Machines, place: Path) -> None:
    program = _run(two[1], place, "--config", "searcher.max_length.batches=60")
    _wait_for_batches(program)
    pid = two[1].find("dstrial.cli", "run")
    assert pid is not None
    two[1].signal(pid, signal.SIGINT)
    code, text = program.end()
    assert code == 130, text
    assert "stopped at batch " in text
    assert "--hostfile hosts" in text
    assert two.processes() == {}
    code, text = _run(
        two[1], place, "--config", "searcher.max_length.batches=60", "--resume", "latest", pause_s=0.0
    ).end()
    assert code == 0, text
    assert "completed at batch 60 of 60" in text


def test_two_batches_are_tried_and_a_host_that_is_not_ready_leaves_no_run(two: Machines, place: Path) -> None:
    code, text = _run(two[1], place, "--test").end()
    assert code == 0, text
    assert "test passed: 2 batches, one validation" in text
    (place / "hosts").write_text("host1 slots=1\nhost9 slots=1\n")
    code, text = _run(two[1], place).end()
    assert code == 1, text
    assert "host9  unknown: no such name" in text
    assert not list(place.glob("runs/*/*")), "nothing was started"


def test_a_host_whose_imports_take_long_is_not_lost(two: Machines, place: Path) -> None:
    start_up = place / "start_up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.uname().nodename == 'host2' and 'dstrial.launch.node' in sys.orig_argv: time.sleep(14)\n"
    )
    (place / "script.py").write_text("print('trained', flush=True)")
    words = ["dstrial.launch", "--hostfile", "hosts", "script.py"]
    code, text = _Program(two[1], place, *words, environ={"PYTHONPATH": str(start_up)}).end()
    assert code == 0, text
    assert text.count("trained") == 2
