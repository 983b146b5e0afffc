"""Signals to supervisors, and the descriptors of those that are watched, where the system refuses."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dstrial.master.backends import local
from dstrial.master.backends.backend import SupervisorHandle
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.supervisor import start_time


@pytest.fixture
def own() -> SupervisorHandle:
    """Return a handle of this process."""
    return SupervisorHandle(os.getpid(), str(start_time(os.getpid())))


def backend() -> LocalBackend:
    fork_servers: Any = None
    return LocalBackend("here", (), fork_servers)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS, errno.EPERM])
def test_signal_is_sent_without_a_descriptor_of_the_process(
    number: int, own: SupervisorHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    local.terminate(SupervisorHandle(own.pid, "another start"))
    assert sent == []
    local.terminate(own)
    assert sent == [(own.pid, signal.SIGTERM), (own.pid, signal.SIGCONT)]


def test_process_that_is_not_watched_leaves_no_descriptor_open(
    own: SupervisorHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    before = num_open()
    backend()._watch_exit(SupervisorHandle(own.pid, "another start"))
    assert num_open() == before
    monkeypatch.setattr(threading.Thread, "start", refuse)
    backend()._watch_exit(own)
    assert num_open() == before
