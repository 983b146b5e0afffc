"""Polling by the launcher's watches, and their status file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE
from dstrial.launch.start_watch import watched_start
from dstrial.launch.watches import StatusFile, polling


def test_polling_continues_until_block_ends_and_closes_once() -> None:
    seen: list[str] = []
    with polling(
        lambda: seen.append("poll"), lambda: seen.append("close"), name="dstrial-test-watch", every_s=0.005
    ):
        wait_for(lambda: seen.count("poll") >= 3)
    assert seen[-1] == "close"
    assert seen.count("close") == 1


def test_polling_logs_equal_exceptions_once_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def poll() -> None:
        seen.append(len(seen))
        if len(seen) <= 3:
            raise OSError("the terminal is gone")

    with caplog.at_level(logging.WARNING), polling(poll, list, name="dstrial-test-watch", every_s=0.005):
        wait_for(lambda: len(seen) >= 5)
    assert [record.message for record in caplog.records] == ["dstrial-test-watch failed once; it continues"]


def test_watched_start_continues_after_broken_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrial.launch.start_watch._SILENCE_S", 0.1)
    phase, told = tmp_path / "phase.json", []

    def print_line(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            raise BrokenPipeError

    with watched_start(lambda: [phase], print_line, root=tmp_path / "none", every_s=0.02):
        for since_s, text in ((1.0, "importing model_def"), (2.0, "loading the checkpoint")):
            phase.write_text(json.dumps({"phase": text, "since_s": since_s}))
            wait_for(lambda text=text: any(text in line for line in told))  # type: ignore[misc]


def test_status_file_is_replaced_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATION_DIR_VARIABLE, str(tmp_path))
    shown = StatusFile("seen.json")
    shown.write(None)
    shown.write({"text": "one"})
    shown.write({"text": "two"})
    assert json.loads((tmp_path / "seen.json").read_text()) == {"text": "two"}
    shown.write(None)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.delenv(ALLOCATION_DIR_VARIABLE)
    StatusFile("seen.json").write({"text": "to nobody"})
    monkeypatch.setenv(ALLOCATION_DIR_VARIABLE, str(tmp_path / "gone"))
    StatusFile("seen.json").write({"text": "to nobody"})
    assert list(tmp_path.iterdir()) == []
