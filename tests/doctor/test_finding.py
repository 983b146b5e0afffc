import threading

import pytest

from dstrial.doctor.finding import Background, NoAnswerError, within


def test_hanging_call_raises_and_may_still_end():
    release = threading.Event()
    hanging = Background(release.wait)
    with pytest.raises(NoAnswerError, match="no answer within 0 s"):
        hanging.result(0.05)
    assert within(30, lambda: 4) == 4
    release.set()
    assert hanging.result(30)


def test_exception_of_a_call_is_raised_each_time():
    def failing():
        raise TimeoutError("its own")

    background = Background(failing)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="its own"):
            background.result(30)


def test_call_runs_in_place_without_threads(monkeypatch):
    """So it is at the limit of processes (``ulimit -u``), which the command is there to tell."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(30, lambda: 4) == 4
