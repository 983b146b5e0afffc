"""Stop signals set a flag; on exit the previous handlers are restored."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from dstrial.ranks.stop_signals import StopSignals


def test_sigterm_sets_flag_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGTERM"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_first_sigint_requests_stop_second_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSTRIAL_LAUNCHED", raising=False)
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)


def test_launched_rank_ignores_sigint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRIAL_LAUNCHED", "1")
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested is None


def test_non_main_thread_installs_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def use() -> None:
        with StopSignals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


@pytest.mark.process
def test_deferred_stop_signals_terminate_until_listen() -> None:
    reader, writer = os.pipe()
    for listens in (False, True):
        pid = os.fork()
        if pid == 0:
            with StopSignals(is_deferred=True) as stop:
                if listens:
                    stop.listen()
                os.write(writer, b"ready")
                while stop.requested is None:
                    time.sleep(0.02)
            os._exit(0)
        os.read(reader, 5)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if listens else -signal.SIGTERM)
    os.close(reader)
    os.close(writer)


@pytest.mark.process
def test_forked_child_still_terminates_on_sigterm() -> None:
    reader, writer = os.pipe()
    with StopSignals() as stop:
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"ready")
            for _ in range(600):
                time.sleep(0.05)
            os._exit(0)
        os.read(reader, 5)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert stop.requested is None
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
