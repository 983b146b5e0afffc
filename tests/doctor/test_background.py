import threading

import pytest

from dstrial.doctor.finding import Background, NoAnswerError, within


def test_a_call_that_hangs_is_given_up_and_the_rest_goes_on():
    release = threading.Event()
    hanging = Background(release.wait)
    with pytest.raises(NoAnswerError, match="no answer within 0 s"):
        hanging.result(0.05)
    assert within(30, lambda: 4) == 4
    release.set()
    assert hanging.result(30)


def test_what_a_call_raises_is_raised_to_whoever_asks_its_own_timeouts_too():
    def failing():
        raise TimeoutError("its own")

    background = Background(failing)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="its own"):
            background.result(30)


def test_where_no_thread_can_be_begun_calls_are_made_one_after_the_other(monkeypatch):
    """So it is at the limit of processes (``ulimit -u``), which the command is there to tell."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(30, lambda: 4) == 4
