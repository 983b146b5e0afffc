"""Locks of torch extension builds: stale locks are removed, held locks stay."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_start
from waiting import wait_for

from dstrial.launch.stale_locks import remove_stale_locks
from dstrial.launch.start_watch import watched_start

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="only /proc tells what is open"),
]

# Acquires torch's build lock and never releases it.
HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
time.sleep(600)
"""
WAITER = """
import sys
from torch.utils.file_baton import FileBaton
FileBaton(sys.argv[1]).wait()
"""
# Releases the lock, but pauses between the two steps of torch: it closes the file, then removes it.
RELEASER = """
import os, sys, time
from torch.utils import file_baton
baton = file_baton.FileBaton(sys.argv[1])
assert baton.try_acquire()
os.utime(sys.argv[1], (time.time() - 60,) * 2)
remove = os.remove
def later(path):
    print("closed", flush=True)
    sys.stdin.readline()
    remove(path)
os.remove = later
baton.release()
"""


def _start(program: str, lock: Path, **pipes: int) -> subprocess.Popen[str]:
    file = lock.parents[1] / "program.py"
    file.write_text(program)
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return warm_start.Popen([sys.executable, str(file), str(lock)], env=env, text=True, **pipes)


def _hold(lock: Path) -> subprocess.Popen[str]:
    lock.parent.mkdir(parents=True)
    holder = _start(HOLDER, lock, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def _make_older(lock: Path) -> None:
    a_minute_ago = time.time() - 60
    os.utime(lock, (a_minute_ago, a_minute_ago))


def test_stale_lock_is_removed_after_holder_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "py311_cpu" / "operator" / "lock"
    holder = _hold(lock)
    try:
        _make_older(lock)
        assert remove_stale_locks(tmp_path) == []
        assert lock.exists()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert lock.exists()
    with caplog.at_level(logging.WARNING):
        assert remove_stale_locks(tmp_path) == [lock]
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_lock_being_released_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "operator" / "lock"
    lock.parent.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with _start(RELEASER, lock, **pipes) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "closed\n"
        printed: list[str] = []
        monkeypatch.setattr(time, "sleep", lambda _: printed.append(builder.communicate("go on\n")[1]))
        assert remove_stale_locks(tmp_path) == []
    assert (builder.returncode, printed) == (0, [""])  # torch raises if the lock file is missing


def test_lock_of_new_build_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "operator" / "lock"
    lock.parent.mkdir()
    lock.touch()
    _make_older(lock)

    def begin_another(seconds: float) -> None:
        lock.unlink()
        (tmp_path / "keeps the number of the file in use").touch()
        lock.touch()
        _make_older(lock)

    monkeypatch.setattr(time, "sleep", begin_another)
    assert remove_stale_locks(tmp_path) == []
    assert lock.exists()


def test_recent_locks_and_other_files_are_kept(tmp_path: Path) -> None:
    lock, built = tmp_path / "operator" / "lock", tmp_path / "operator" / "operator.so"
    lock.parent.mkdir()
    lock.touch()
    built.touch()
    _make_older(built)
    assert remove_stale_locks(tmp_path) == []
    assert remove_stale_locks(tmp_path / "nowhere") == []
    assert lock.exists()
    assert built.exists()


def test_launch_removes_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrial.launch.local_ranks import run_ranks

    lock = tmp_path / "operator" / "lock"
    lock.parent.mkdir()
    lock.touch()
    _make_older(lock)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    outcome = run_ranks([sys.executable, "-c", WAITER, str(lock)], num_ranks=1)
    assert outcome.exit_code == 0
    assert not lock.exists()


def test_running_build_is_reported_once_with_workaround(tmp_path: Path) -> None:
    lock = tmp_path / "py312_cu130" / "fused_adam" / "lock"
    holder = _hold(lock)
    try:
        told: list[str] = []
        with watched_start(list, told.append, every_s=0.05, root=tmp_path):
            time.sleep(0.3)
            assert told == []
            _make_older(lock)
            wait_for(lambda: told)
            time.sleep(0.3)
        assert lock.exists()
        (line,) = told
        assert line.startswith("starting: compiling operator fused_adam since ")
        assert f"the result is kept in {lock.parent} for the next start" in line
        assert 'set `"torch_adam": true` in optimizer.params' in line
    finally:
        holder.kill()
        holder.communicate()
