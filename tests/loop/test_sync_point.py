"""Intervals and results of the sync points between ranks."""

import concurrent.futures
import contextlib

from determined import core

from dstrial.loop.sync_point import StopReason, SyncPoints


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def points_at(seconds_per_batch, total, stop_request=lambda _clock: None):
    clock = Clock()
    points = SyncPoints(core.DummyDistributedContext(), lambda: stop_request(clock), clock)
    points.start(0)
    agreed = []
    for batches in range(1, total + 1):
        clock.now_s += seconds_per_batch
        if batches >= points.next_batch or points.is_stop_requested():
            agreement = points.agree(batches)
            agreed.append((batches, agreement.stop))
            if agreement.stop:
                break
    return agreed


def test_sync_interval_grows_to_five_seconds():
    agreed = [batches for batches, _ in points_at(0.01, 3000)]
    gaps = [b - a for a, b in zip(agreed, agreed[1:], strict=False)]
    assert agreed[0] == 1
    assert gaps[:2] == [8, 64]
    assert set(gaps[2:]) <= {499, 500, 501}


def test_slow_batches_sync_after_every_batch():
    assert [batches for batches, _ in points_at(20.0, 5)] == [1, 2, 3, 4, 5]


def test_stop_request_stops_after_current_batch():
    stop_request = lambda clock: StopReason.SIGNAL if clock.now_s > 1.005 else None  # noqa: E731
    assert points_at(0.01, 3000, stop_request)[-1] == (101, StopReason.SIGNAL)


def test_agree_uses_determined_context():
    """A user may pass Determined's DistributedContext to `init(distributed=...)`."""

    def exchange(rank):
        with contextlib.closing(
            core.DistributedContext(
                rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1,
                chief_ip="127.0.0.1", port_offset=47,
            )
        ) as distributed:  # fmt: skip
            points = SyncPoints(distributed, lambda: StopReason.REQUESTED if rank == 1 else None, Clock())
            points.start(0)
            agreement = points.agree(1, payload=rank)
            return agreement.payloads, agreement.stop, points.next_batch

    with concurrent.futures.ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(exchange, range(2))) == [([0, 1], StopReason.REQUESTED, 9)] * 2
