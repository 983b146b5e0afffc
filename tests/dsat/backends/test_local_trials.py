"""Launched trials of this machine that ended while no search looked at them: real processes, and what they leave on disk."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from searching import settings_of, write_experiment
from waiting import wait_for

from dstrial.dsat.backends.local import LocalBackend
from dstrial.dsat.backends.processes import found, launch
from dstrial.dsat.backends.trial_spec import measuring_spec
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import Failure, FailureKind, failure_line

pytestmark = pytest.mark.process

BASE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
RESULT = "DSTRIAL_DSAT_RESULT"
HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("kind", "is_kept"),
    [
        (FailureKind.DEVICE_OOM, True),
        (FailureKind.BAD_CONFIG, True),
        (FailureKind.USER_ERROR, False),
        (FailureKind.CANCELED, False),
        (None, False),
    ],
)
def test_a_trial_that_failed_while_the_search_was_dead_is_repeated_only_where_that_may_help(
    tmp_path: Path, kind: FailureKind | None, is_kept: bool
) -> None:
    backend, record = _backend(tmp_path)
    directory = record.trial_path(1)
    directory.mkdir(parents=True)
    said = "ends" if kind is None else failure_line(Failure(kind, "it failed", "forward"))
    variables = {**os.environ, RESULT: str(directory / "result.json")}
    process = launch(
        ["/bin/sh", "-c", 'echo "$0"; exit 1', said],
        directory,
        cwd=tmp_path,
        variables=variables,
    ).process
    assert process is not None
    process.wait()
    _age(directory)
    spec = measuring_spec(backend._settings, backend._settings.space.own(), 1, record.search_id)

    assert backend.adopt(spec, {}) is is_kept
    ended = backend.poll()

    assert len(ended) == is_kept
    if is_kept:
        assert isinstance(ended[0].outcome, Failure)
        assert (ended[0].outcome.kind, ended[0].outcome.phase) == (kind, "forward")
        # It ran for ten seconds an hour ago.
        assert ended[0].seconds == pytest.approx(10.0, abs=0.1)


def _age(directory: Path) -> None:
    now_s = time.time()
    os.utime(directory / "launcher.stat", times=(now_s - HOUR_S, now_s - HOUR_S))
    os.utime(directory / "output.log", times=(now_s - HOUR_S + 10, now_s - HOUR_S + 10))


def _backend(directory: Path) -> tuple[LocalBackend, SearchRecord]:
    path = write_experiment(directory, BASE, entrypoint="python3 -m dstrial.launch train.py")
    settings = settings_of(path, "--local", "--output", str(directory / "out"))
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    return LocalBackend(settings, record), record


def test_launcher_of_a_script_is_found_and_ended(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path('rank').write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    variables = {**os.environ, RESULT: str(tmp_path / "result.json"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "dstrial.launch", "--slots", "1", "waits.py"]

    running = launch(words, tmp_path, cwd=tmp_path, variables=variables)
    try:
        wait_for(lambda: (tmp_path / "rank").exists() and (tmp_path / "rank").read_text(), deadline_s=120.0)
        rank = int((tmp_path / "rank").read_text())
        by_others = found(tmp_path)

        assert by_others is not None
        assert (by_others.pid, by_others.exit_code) == (running.pid, None)
        for pid in (running.pid, rank):
            # What /proc shows of a new process are its own variables.
            assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{pid}/environ").read_bytes()
            assert f"{RESULT}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        # Ranks of scripts are new processes.
        assert b"RANK=0" in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    finally:
        running.end()
    assert running.exit_code is not None
    wait_for(lambda: not Path(f"/proc/{rank}").exists())
