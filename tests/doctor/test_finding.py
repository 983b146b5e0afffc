import threading

import pytest

from dstrial.doctor.finding import Background, NoAnswerError, within


def test_background_timeout_raises_and_result_remains_available():
    release = threading.Event()
    hanging = Background(release.wait)
    with pytest.raises(NoAnswerError, match="no answer within 0 s"):
        hanging.result(0.05)
    assert within(30, lambda: 4) == 4
    release.set()
    assert hanging.result(30)


def test_background_exception_is_raised_each_time():
    def failing():
        raise TimeoutError("its own")

    background = Background(failing)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="its own"):
            background.result(30)
