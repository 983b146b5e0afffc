"""What is written behind the loop: in order, once, with failures that the loop hears of."""

import functools
import logging
import threading
import time

import pytest

from dstrial.errors import DstrialError
from dstrial.loop.metric_sinks import ReportWriter


class Places:
    """Where reports go; fails or hangs when told to."""

    def __init__(self):
        self.recorded = []
        self.published = []
        self.threads = set()
        self.fails_at = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, step):
        self.threads.add(threading.get_ident())
        assert self.may_go_on.wait(60)
        if ("record", step) in self.fails_at:
            raise self.fails_at["record", step]
        self.recorded.append(step)
        if ("publish", step) in self.fails_at:
            raise self.fails_at["publish", step]
        self.published.append(step)


@pytest.fixture
def places():
    return Places()


@pytest.fixture
def writer(places):
    writer = ReportWriter(deadline_s=60, capacity=4)
    yield writer
    places.may_go_on.set()
    writer.close()


def hand_over(places, writer, *steps):
    for step in steps:
        writer.submit(functools.partial(places.write, step))


def test_reports_are_written_in_order_on_thread(places, writer):
    hand_over(places, writer, *range(100))
    writer.flush()
    assert places.recorded == places.published == list(range(100))
    assert len(places.threads) == 1
    assert threading.get_ident() not in places.threads


def test_submit_does_not_block_on_hanging_write(places, writer):
    places.may_go_on.clear()
    hand_over(places, writer, 1, 2, 3)
    assert places.recorded == []
    places.may_go_on.set()
    writer.flush()
    assert places.recorded == [1, 2, 3]


def test_submit_blocks_while_queue_is_full(places, writer):
    places.may_go_on.clear()
    hand_over(places, writer, 1, 2, 3, 4)
    threading.Timer(0.3, places.may_go_on.set).start()
    began_s = time.monotonic()
    hand_over(places, writer, 5)
    assert time.monotonic() - began_s > 0.2
    writer.flush()
    assert places.recorded == [1, 2, 3, 4, 5]


def test_flush_has_deadline(places):
    writer = ReportWriter(deadline_s=0.2)
    places.may_go_on.clear()
    hand_over(places, writer, 1, 2)
    with pytest.raises(DstrialError, match=r"2 reports .* not written after 0.2 s"):
        writer.flush()
    places.may_go_on.set()
    writer.close()


@pytest.mark.parametrize("at", ["record", "publish"])
def test_failure_ends_writing_and_is_returned_once(places, writer, at):
    """A report that is recorded is not written again because a sink has failed."""
    error = places.fails_at[at, 2] = OSError(28, "No space left on device")
    hand_over(places, writer, 1, 2, 3)
    writer.flush()
    hand_over(places, writer, 4)
    assert writer.failure == "OSError: [Errno 28] No space left on device"
    assert writer.call(lambda: "closed") == "closed"
    assert places.recorded == ([1] if at == "record" else [1, 2])
    assert places.published == [1]
    assert writer.take_error() is error
    assert writer.failure is None
    assert writer.take_error() is None


def test_call_waits_for_queue_and_raises_errors(places, writer):
    places.may_go_on.clear()
    hand_over(places, writer, 1)
    threading.Timer(0.1, places.may_go_on.set).start()
    assert writer.call(lambda: list(places.recorded)) == [1]
    with pytest.raises(ZeroDivisionError):
        writer.call(lambda: 1 / 0)
    assert writer.failure is None


def test_close_writes_queue_and_logs_unreported_error(places, caplog):
    writer = ReportWriter(deadline_s=60)
    places.fails_at["record", 3] = OSError(28, "No space left on device")
    hand_over(places, writer, 1, 2, 3)
    with caplog.at_level(logging.ERROR, logger="dstrial.loop"):
        writer.close()
    assert places.recorded == [1, 2]
    assert "a report could not be written: OSError: [Errno 28] No space left" in caplog.text
    assert not any(thread.name == "dstrial-reports" for thread in threading.enumerate())


def test_no_thread_without_reports(places):
    writer = ReportWriter(deadline_s=60)
    writer.flush()
    writer.close()
    assert not any(thread.name == "dstrial-reports" for thread in threading.enumerate())
