"""Training checks as processes: however one ends, it is named, the rest goes on, and what is there is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.doctor.training import TrainOptions, run_training_checks
from dstrial.doctor.training.check import Check
from dstrial.errors import DstrialError

SAMPLES = Path(__file__).parent / "sample_checks"

pytestmark = [pytest.mark.process]


def check(name: str, *, needs_s: float = 1, deadline_s: float = 60, always: bool = False) -> Check:
    return Check(name, f"title of {name}", f"sample_{name}", needs_s, deadline_s, always)


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *checks: Check, **options: Any
) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))
    status = run_training_checks(TrainOptions(output=tmp_path / "out", **options), checks)
    value = json.loads((tmp_path / "out" / "result.json").read_text())
    return status, value, {one["name"]: one for one in value["checks"]}


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody has reaped yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_end_of_a_check_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("ok", "failed", "segfault", "garbage", "not_applicable", "error")
    status, value, found = run(
        tmp_path, monkeypatch, *map(check, names), check("hang", deadline_s=8), check("ok")
    )
    assert status == 1
    assert [one["name"] for one in value["checks"]] == [*names, "hang", "ok"]
    assert value["counts"] == {"ok": 2, "failed": 5, "not applicable": 1, "not reached": 0}
    assert value["ended_at"] is not None
    assert found["ok"]["status"] == "ok"
    assert found["ok"]["facts"] == {"answer": 42, "rows": [{"a": 1, "b": True}]}
    assert found["ok"]["not_shown"] == "the other half"
    assert found["failed"]["summary"] == "the wheel is square"
    assert found["failed"]["advice"] == "Buy a round one."
    assert found["failed"]["output"] == "what it printed"
    assert "SIGSEGV" in found["segfault"]["summary"]
    assert "at the last thing" in found["segfault"]["summary"]
    assert found["garbage"]["status"] == "failed"
    assert "exit code 0 and without an answer" in found["garbage"]["summary"]
    assert "garbage" in found["garbage"]["output"]
    assert len(found["garbage"]["output"]) < 10_000
    assert found["not_applicable"]["status"] == "not applicable"
    assert found["not_applicable"]["advice"] == "Get one."
    assert "ZeroDivisionError: nobody expected this" in found["error"]["summary"]
    assert "sample_error.py" in found["error"]["output"]
    told = capsys.readouterr().err
    for name in (*names, "hang"):
        assert f"] {name}: title of {name}" in told
        assert f"] {name}: {found[name]['status']}, " in told
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Buy a round one." in report
    assert "the other half" in report


def test_a_check_that_hangs_is_ended_with_all_that_it_started_and_says_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, found = run(tmp_path, monkeypatch, check("hang", deadline_s=6), check("ok"))
    assert status == 1
    assert found["hang"]["status"] == "failed"
    assert "did not end within its deadline of 6 s" in found["hang"]["summary"]
    assert "at waiting for Godot" in found["hang"]["summary"]
    assert found["hang"]["facts"] == {"seen": 1}
    assert "sample_hang.py" in found["hang"]["output"], "its stack, by which one sees where it hung"
    assert not is_alive(int((tmp_path / "out" / "checks" / "hang" / "daemon").read_text()))
    assert found["ok"]["status"] == "ok"


def test_when_the_minutes_are_up_a_running_check_is_cut_off_and_others_are_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    status, value, found = run(
        tmp_path, monkeypatch, check("hang", deadline_s=600), check("ok", needs_s=100), minutes=0.15
    )
    assert time.monotonic() - began_s < 60
    assert status == 0, "nothing failed"
    assert found["hang"]["status"] == "not reached"
    assert "cut off" in found["hang"]["summary"]
    assert found["hang"]["facts"] == {"seen": 1}
    assert found["ok"]["status"] == "not reached"
    assert value["counts"]["not reached"] == 2


def test_only_and_skip_choose_by_name_and_an_unknown_name_lists_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (check("not_applicable", always=True), check("failed"), check("ok"))
    status, _, found = run(tmp_path, monkeypatch, *checks, only=("ok",))
    assert status == 0
    assert list(found) == ["not_applicable", "ok"], "what the report needs runs all the same"
    status, _, found = run(tmp_path, monkeypatch, *checks, skip=("failed", "not_applicable"))
    assert list(found) == ["ok"]
    with pytest.raises(
        DstrialError, match=r"--skip is nothing; expected .* Choose from not_applicable, failed, ok\."
    ):
        run(tmp_path, monkeypatch, *checks, skip=("nothing",))


def test_what_has_ended_is_kept_when_the_whole_command_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the command while a check runs: the JSON is whole, has what ended, and says what was running."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dstrial.doctor.training import TrainOptions, run_training_checks\n"
        "from dstrial.doctor.training.check import Check\n"
        "checks = [Check(name, name, f'sample_{name}', 1, 60) for name in ('ok', 'hang')]\n"
        "run_training_checks(TrainOptions(output=Path(sys.argv[1])), checks)\n"
    )
    out = tmp_path / "out"
    command = subprocess.Popen(
        [sys.executable, "-c", program, str(out)], env={**os.environ, "PYTHONPATH": str(SAMPLES)}
    )
    daemon = out / "checks" / "hang" / "daemon"
    try:
        wait_for(lambda: daemon.exists() and daemon.read_text())
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    value = json.loads((out / "result.json").read_text())
    assert [one["name"] for one in value["checks"]] == ["ok"]
    assert value["running"] == "hang"
    assert "1 ok" in (out / "report.md").read_text()
    wait_for(lambda: not is_alive(int(daemon.read_text())), "what the check has started outlives the command")
