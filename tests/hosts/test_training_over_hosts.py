"""``dstrial run --hostfile``: run directory, failures, stop and resume."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hosts_runs import CONFIG, Dstrial, copy_into, losses
from machines import Machine, Machines, machines

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.fixture
def two() -> Iterator[Machines]:
    with machines(2) as made:
        yield made


@pytest.fixture
def place(two: Machines, tmp_path: Path) -> Iterator[Path]:
    """Return a directory with trial, config and hostfile; teardown stops its master."""
    copy_into(tmp_path, "small_trial.py", "small_pipeline.py")
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    yield tmp_path
    _dstrial(two[1], tmp_path, "down", "--now").end()


def _dstrial(machine: Machine, place: Path, *words: str) -> Dstrial:
    (place / "home").mkdir(exist_ok=True)
    own = {"DSTRIAL_STATE_DIR": str(place / "state"), "HOME": str(place / "home")}
    return Dstrial(machine, place, *words, env={**os.environ, **own})


def _run(machine: Machine, place: Path, *flags: str, batches: int = 20, pause_s: float = 0.1) -> Dstrial:
    settings = [f"hyperparameters.pause_s={pause_s}", f"searcher.max_length.batches={batches}"]
    words = [word for setting in settings for word in ("--config", setting)]
    return _dstrial(machine, place, "run", "exp.yaml", ".", "--hostfile", "hosts", *words, *flags)


def _run_directory(place: Path) -> Path:
    (found,) = place.glob("runs/*/*")
    return found


def _steps_completed(place: Path) -> list[int]:
    rows = map(json.loads, (_run_directory(place) / "metrics.jsonl").read_text().splitlines())
    return [row["steps_completed"] for row in rows if row["group"] == "training"]


def test_run_directory_contains_ranks_of_all_hosts(two: Machines, place: Path) -> None:
    code, text = _run(two[1], place, pause_s=0.0).end()
    assert code == 0, text
    assert "host2: 1 slot at 10.77.0.12 (eth0)" in text
    assert "completed at batch 20 of 20" in text
    assert len(losses(text)) == 4
    assert _steps_completed(place) == [5, 10, 15, 20]
    logs = _run_directory(place) / "logs"
    assert {str(path.relative_to(logs)) for path in logs.glob("*/rank_*")} == {
        "attempt_1/rank_0",
        "attempt_1/rank_1",
    }

    code, text = _run(two[1], place, "--include", "host1").end()
    assert code == 1
    assert "has host1 slots=1, host2 slots=1; expected host1 slots=1. End it with `dstrial down`" in text


def test_script_runs_on_all_slots_without_leaking_token(two: Machines, place: Path) -> None:
    (place / "script.py").write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"
        "assert os.environ['GLOO_SOCKET_IFNAME'] == 'eth0'\n"
        "words = [open(f'/proc/{pid}/cmdline').read() for pid in os.listdir('/proc') if pid.isdigit()]\n"
        "assert not any(os.environ['DET_SESSION_TOKEN'] in one for one in words)\n"
    )
    code, text = _run(two[1], place, "--config", "entrypoint=python3 script.py --a 'b c'").end()
    assert code == 0, text
    assert "[rank 0] rank 0 of 2 ['--a', 'b c']" in text
    assert "[rank 1] rank 1 of 2 ['--a', 'b c']" in text


def test_run_continues_after_host_loss(two: Machines, place: Path) -> None:
    program = _run(two[1], place, batches=100)
    program.wait_for("batch 15 loss")
    two[2].cut()
    program.wait_for("host2 (rank 1) is silent for 5 s")
    program.wait_for("allocation lost: host2 is ")
    code, text = program.end()
    assert code == 0, text
    assert "completed at batch 100 of 100" in text
    assert _steps_completed(place) == list(range(5, 101, 5))
    assert (_run_directory(place) / "logs" / "attempt_2" / "rank_0").is_dir()


def test_ctrl_c_stops_hosts_and_run_resumes(two: Machines, place: Path) -> None:
    program = _run(two[1], place, batches=60)
    program.wait_for("batch 15 loss")
    pid = two[1].find("-m dstrial run")
    assert pid is not None
    two[1].signal(pid, signal.SIGINT)
    code, text = program.end()
    assert code == 130, text
    assert "stopped at batch " in text
    assert "--hostfile hosts" in text
    code, text = _run(two[1], place, "--resume", "latest", batches=60).end()
    assert code == 0, text
    assert "completed at batch 60 of 60" in text
    assert _steps_completed(place) == list(range(5, 61, 5))


def test_test_flag_passes_and_unready_host_rejected(two: Machines, place: Path) -> None:
    code, text = _run(two[1], place, "--test").end()
    assert code == 0, text
    assert "test passed: 2 batches, one validation" in text
    assert _dstrial(two[1], place, "down").end()[0] == 0
    (place / "hosts").write_text("host1 slots=1\nhost9 slots=1\n")
    code, text = _run(two[1], place).end()
    assert code == 1, text
    assert "host9  unknown: no such name" in text
    assert not list(place.glob("runs/*/*")), "nothing was started"
