"""Intervals and results of the sync points between ranks."""

import concurrent.futures
import contextlib

from determined import core

from dstrial.errors import PeerFailedError
from dstrial.loop.sync_point import StopReason, SyncPoints, result_of_chief


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def on_two_ranks(function):
    """Call a function with the Determined context of each of two threads."""

    def run(rank):
        with contextlib.closing(
            core.DistributedContext(
                rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1,
                chief_ip="127.0.0.1", port_offset=47,
            )
        ) as distributed:  # fmt: skip
            return function(distributed)

    with concurrent.futures.ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(run, range(2)))


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

    def exchange(distributed):
        reason = StopReason.REQUESTED if distributed.rank == 1 else None
        points = SyncPoints(distributed, lambda: reason, Clock())
        points.start(0)
        agreement = points.agree(1, payload=distributed.rank)
        return agreement.payloads, agreement.stop, points.next_batch

    assert on_two_ranks(exchange) == [([0, 1], StopReason.REQUESTED, 9)] * 2


def test_all_ranks_get_result_or_error_of_chief():
    def call(distributed):
        def fail():
            raise KeyError("no such label")

        try:
            return result_of_chief(distributed, "evaluate_full_dataset", fail)
        except (KeyError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"

    assert on_two_ranks(lambda one: result_of_chief(one, "save", lambda: one.rank + 7)) == [7, 7]
    chief, other = on_two_ranks(call)
    assert chief == "KeyError: 'no such label'"
    assert other.startswith("PeerFailedError: evaluate_full_dataset has failed on rank 0 (KeyError: 'no such")
