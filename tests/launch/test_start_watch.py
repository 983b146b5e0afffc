"""Log lines and status file for slow startup phases and operator builds."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.launch.start_watch import is_due, oldest_phase, watched_start
from dstrial.launch.watches import polling
from dstrial.ranks.startup_phase import PHASE_FILE_VARIABLE, TRAINING, begin_phase, end_phases, read_phase


def test_phase_is_logged_within_five_seconds_then_rarely() -> None:
    told: list[float] = []
    for tenth in range(12_000):
        age_s = tenth / 10
        if is_due(age_s, told[-1] if told else None, age_s - (told[-1] if told else 0)):
            told.append(age_s)
    assert told[0] < 5
    assert told[1:4] == [30.0, 60.0, 120.0]
    assert len(told) == 7  # in 20 minutes


def test_activity_is_longest_phase_until_all_ranks_train() -> None:
    assert oldest_phase([None, ("building", 20.0)], 10.0) == ("creating the processes", 10.0)
    assert oldest_phase([("building", 20.0), ("importing", 15.0)], 10.0) == ("importing", 15.0)
    assert oldest_phase([("", 30.0), ("building", 20.0)], 10.0) == ("building", 20.0)
    assert oldest_phase([("", 30.0), ("", 31.0)], 10.0) is None


def test_phase_file_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank_0.phase.json"
    monkeypatch.setenv(PHASE_FILE_VARIABLE, str(path))
    begin_phase("importing model_def")
    assert (read_phase(path) or ("x", 0))[0] == "importing model_def"
    end_phases()
    assert (read_phase(path) or ("x", 0))[0] == ""


def test_starting_phase_is_written_to_allocation_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRIAL_ALLOCATION_DIR", str(tmp_path))
    monkeypatch.setattr("dstrial.launch.start_watch._SILENCE_S", 0.1)
    path, shown = tmp_path / "phase.json", tmp_path / "starting.json"
    path.write_text(json.dumps({"phase": "importing model_def", "since_s": time.time() - 60}))
    told: list[str] = []
    with watched_start(lambda: [path], told.append, root=tmp_path / "none", every_s=0.02):
        wait_for(lambda: shown.exists() and told)
        fields = json.loads(shown.read_text())
        assert fields["phase"] == "importing model_def"
        path.write_text(json.dumps({"phase": "", "since_s": time.time()}))
        wait_for(lambda: not shown.exists())
    assert len(told) == 1
    assert told[0].startswith("starting: importing model_def, for 6")


def test_build_is_not_reported_while_all_ranks_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrial.launch.start_watch._SILENCE_S", 0.1)
    monkeypatch.setenv("DSTRIAL_ALLOCATION_DIR", str(tmp_path))
    lock = tmp_path / "operators" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    phases = [tmp_path / f"{rank}.json" for rank in range(2)]
    told: list[str] = []
    with lock.open("w") as held:
        os.utime(held.fileno(), (time.time() - 60, time.time() - 60))
        phases[0].write_text(json.dumps({"phase": TRAINING, "since_s": time.time()}))
        phases[1].write_text(json.dumps({"phase": TRAINING, "since_s": time.time()}))
        with watched_start(lambda: phases, told.append, root=lock.parents[1], every_s=0.02):
            time.sleep(0.5)  # longer than _SILENCE_S
            assert told == []
            phases[1].write_text(json.dumps({"phase": "", "since_s": time.time()}))
            wait_for(lambda: told)
    assert told[0].startswith("starting: compiling operator fused_adam since ")


def test_polling_logs_equal_exceptions_once_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def poll() -> None:
        seen.append(len(seen))
        if len(seen) <= 3:
            raise OSError("the terminal is gone")

    with caplog.at_level(logging.WARNING), polling(poll, list, name="dstrial-test-watch", every_s=0.005):
        wait_for(lambda: len(seen) >= 5)
    assert [record.message for record in caplog.records] == ["dstrial-test-watch failed once; it continues"]
