"""ReportWriter: order, blocking and failures of background writes."""

import functools
import logging
import threading
import time

import pytest

from dstrial.errors import DstrialError
from dstrial.loop.metric_sinks import ReportWriter


class FakeSink:
    """Records written steps; fails at steps in ``fails_at``, blocks on ``may_go_on``."""

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
def sink():
    return FakeSink()


@pytest.fixture
def writer(sink):
    writer = ReportWriter(deadline_s=60, capacity=4)
    yield writer
    sink.may_go_on.set()
    writer.close()


def submit(sink, writer, *steps):
    for step in steps:
        writer.submit(functools.partial(sink.write, step))


def test_reports_are_written_in_order_on_thread(sink, writer):
    submit(sink, writer, *range(100))
    writer.flush()
    assert sink.recorded == sink.published == list(range(100))
    assert len(sink.threads) == 1
    assert threading.get_ident() not in sink.threads


def test_submit_blocks_while_queue_is_full(sink, writer):
    sink.may_go_on.clear()
    submit(sink, writer, 1, 2, 3, 4, 5)  # one runs, four are queued
    threading.Timer(0.3, sink.may_go_on.set).start()
    began_s = time.monotonic()
    submit(sink, writer, 6)
    assert time.monotonic() - began_s > 0.2
    writer.flush()
    assert sink.recorded == [1, 2, 3, 4, 5, 6]


def test_flush_has_deadline(sink):
    writer = ReportWriter(deadline_s=0.2)
    sink.may_go_on.clear()
    submit(sink, writer, 1, 2)
    with pytest.raises(DstrialError, match=r"not written after 0.2 s"):
        writer.flush()
    sink.may_go_on.set()
    writer.close()


@pytest.mark.parametrize("at", ["record", "publish"])
def test_failure_ends_writing_and_is_returned_once(sink, writer, at):
    """A recorded report is not written again if its publication fails."""
    error = sink.fails_at[at, 2] = OSError(28, "No space left on device")
    submit(sink, writer, 1, 2, 3)
    writer.flush()
    submit(sink, writer, 4)
    assert writer.failure == "OSError: [Errno 28] No space left on device"
    assert writer.call(lambda: "closed") == "closed"
    assert sink.recorded == ([1] if at == "record" else [1, 2])
    assert sink.published == [1]
    assert writer.take_error() is error
    assert writer.failure is None
    assert writer.take_error() is None


def test_call_waits_for_queue_and_raises_errors(sink, writer):
    sink.may_go_on.clear()
    submit(sink, writer, 1)
    threading.Timer(0.1, sink.may_go_on.set).start()
    assert writer.call(lambda: list(sink.recorded)) == [1]
    with pytest.raises(ZeroDivisionError):
        writer.call(lambda: 1 / 0)
    assert writer.failure is None


def test_close_writes_queue_and_logs_unreported_error(sink, caplog):
    writer = ReportWriter(deadline_s=60)
    sink.fails_at["record", 3] = OSError(28, "No space left on device")
    submit(sink, writer, 1, 2, 3)
    with caplog.at_level(logging.ERROR, logger="dstrial.loop"):
        writer.close()
    assert sink.recorded == [1, 2]
    assert "a report could not be written: OSError: [Errno 28] No space left" in caplog.text
    assert not any(thread.name == "dstrial-reports" for thread in threading.enumerate())
