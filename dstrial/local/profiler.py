"""Determined's profiler: system metrics of a node.

They are collected by a thread of the node's first rank. Differs from Determined's own in what it leaves alone: devices of other
trials, errors that belong to the reports of training, and the time of a run that is shorter than a window, which is reported at
its end.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from determined import core

from dstrial.local.system_metrics import SystemSampler

logger = logging.getLogger("dstrial.local")

_LEAST_INTERVAL_S = 0.1
_LAST_REPORT_S = 10.0
"""How long the end of a training waits for the last report."""


class SystemMetricsSink(Protocol):
    """Where a node's system metrics go.

    Its methods are called by one thread at a time.
    """

    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        """Take the averages of one group, ``{agent: {name: value}}``."""

    def close(self) -> None:
        """Send what is under way; ``report`` may be called again afterwards."""


class NodeProfiler(core.ProfilerContext):  # type: ignore[misc]  # mypy does not follow determined
    """Switches the collection of a node's system metrics on and off.

    Args:
        agent_id: what the node is called in reports.
        distributed: the ranks of the job; the first one of each node collects.
        sink: where averages go.
        device_uuids: returns the devices of the trial on this node, as NVML calls them.
    """

    def __init__(
        self,
        agent_id: str,
        distributed: core.DistributedContext,
        sink: SystemMetricsSink,
        device_uuids: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._agent_id = agent_id
        self._collects = distributed.local_rank == 0
        self._sink = sink
        self._device_uuids = device_uuids
        self._thread: _Collector | None = None

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Begin to collect.

        Does nothing where it has begun, and on other ranks than a node's first.

        Args:
            sampling_interval: seconds between two samples, at least 0.1.
            samples_per_report: how many of them a report averages.

        Raises:
            ValueError: one of them is something else.

        Ranks: any; no communication, no synchronisation of a device.
        """
        if not isinstance(sampling_interval, (int, float)) or not sampling_interval >= _LEAST_INTERVAL_S:
            raise ValueError(
                f"profiler.on(sampling_interval={sampling_interval!r}) is too short or no number; expected at least "
                f"{_LEAST_INTERVAL_S} s. Leave it out for a sample each second."
            )
        if not isinstance(samples_per_report, int) or samples_per_report < 1:
            raise ValueError(
                f"profiler.on(samples_per_report={samples_per_report!r}) is no number of samples; expected an integer of at "
                "least 1. Leave it out for reports of 10 samples."
            )
        if self._thread is not None or not self._collects:
            return
        self._thread = _Collector(
            self._agent_id, self._sink, self._device_uuids(), sampling_interval, samples_per_report
        )
        self._thread.start()

    def off(self) -> None:
        """Report what is left and end. Ranks: any.

        It may be called again, and followed by :meth:`on`.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _close(self) -> None:
        self.off()


class _Collector(threading.Thread):
    def __init__(
        self,
        agent_id: str,
        sink: SystemMetricsSink,
        device_uuids: Sequence[str],
        interval_s: float,
        samples_per_report: int,
    ) -> None:
        super().__init__(name="dstrial-profiler", daemon=True)
        self._agent_id, self._sink, self._device_uuids = agent_id, sink, device_uuids
        self._interval_s, self._samples_per_report = interval_s, samples_per_report
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            with contextlib.closing(SystemSampler(self._device_uuids)) as sampler:
                self._collect(sampler)
            self._sink.close()
        except Exception as error:  # noqa: BLE001  # a thread's outermost function; collecting never ends a training
            logger.warning(
                "system metrics are not collected any more (%s: %s); training goes on",
                type(error).__name__,
                error,
            )

    def stop(self) -> None:
        """End after one last report."""
        self._is_over.set()
        self.join(_LAST_REPORT_S)
        if self.is_alive():
            logger.warning("the last system metrics are still on their way; they may be lost")

    def _collect(self, sampler: SystemSampler) -> None:
        has_reported = is_last = False
        while not is_last:
            is_last = self._is_over.wait(self._interval_s)
            if not is_last or not (has_reported or sampler.num_samples):
                sampler.sample()
            if is_last or sampler.num_samples >= self._samples_per_report:
                now = datetime.datetime.now(datetime.timezone.utc)
                for group, metrics in sampler.take().items():
                    self._sink.report(group, {self._agent_id: metrics}, now)
                has_reported = True
