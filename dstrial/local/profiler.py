"""Determined's profiler: system metrics of a node, collected by a thread.

Groups, names and units are those of Determined's (0.38.1 ``core/_profiler.py``). Everything comes from the kernel and the
driver; no device is synchronised. Unlike Determined's, it leaves out devices of other trials, raises no error of training's
reports, and reports a run that is shorter than a window at its end.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]  # no stubs are installed
from determined import core
from determined.common import constants

logger = logging.getLogger("dstrial.local")

GROUPS = ("gpu", "cpu", "memory", "disk", "network")

_LEAST_INTERVAL_S = 0.1
_LAST_REPORT_S = 10.0  # how long the end of a training waits for the last report
_DISK_PATHS = ("/", constants.SHARED_FS_CONTAINER_PATH)


class SystemMetricsSink(Protocol):
    """Where a node's system metrics go; called by one thread at a time."""

    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        """Take the averages of one group, ``{agent: {name: value}}``."""

    def close(self) -> None:
        """Send what is queued; ``report`` may be called again afterwards."""


class NodeProfiler(core.ProfilerContext):  # type: ignore[misc]  # mypy does not follow determined
    """Switches the collection of a node's system metrics on and off.

    ``device_uuids`` returns the devices of the trial on this node, as NVML calls them.
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
        """Start collecting, on a node's first rank; idempotent.

        ``sampling_interval`` is in seconds, at least 0.1; a report averages ``samples_per_report``.
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
        """Report what is left and stop; idempotent, and :meth:`on` may follow."""
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


class Rates:
    """Turns counters that only grow into numbers per second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_s = 0.0
        self._before: Mapping[str, float] = {}

    def take(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return each counter's growth per second since the last call; empty at the first."""
        now_s = self._clock()
        seconds, self._read_s = now_s - self._read_s, now_s
        before, self._before = self._before, counters
        if seconds <= 0.0:
            return {}
        return {name: (value - before[name]) / seconds for name, value in counters.items() if name in before}


def average(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each number over the samples that have it, also nested ones."""
    found: dict[str, list[Any]] = {}
    for sample in samples:
        for name, value in sample.items():
            found.setdefault(name, []).append(value)
    return {
        name: average(values) if isinstance(values[0], Mapping) else sum(values) / len(values)
        for name, values in found.items()
    }


class Devices:
    """NVIDIA's devices of one trial, through NVML; UUIDs of other makers are left out."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles: dict[str, Any] = {}
        self._nvml: Any = None
        if not any(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids):
            return
        try:
            nvml: Any = importlib.import_module("pynvml")  # only where there are devices
            nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001  # an import, a driver: whatever is amiss, there is no reading
            logger.warning("NVML cannot be used (%s); no metrics of GPUs are collected", error)
            return
        self._nvml = nvml
        for uuid in uuids:
            try:
                self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml.NVMLError as error:
                logger.warning("NVML does not know GPU %s (%s); it has no metrics", uuid, error)

    def read(self) -> dict[str, dict[str, float]]:
        """Return utilisation in percent and free memory in bytes by device.

        A MIG instance has no utilisation.
        """
        reads: dict[str, Callable[[Any], float]] = {
            "gpu_util": lambda handle: float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_free_memory": lambda handle: float(self._nvml.nvmlDeviceGetMemoryInfo(handle).free),
        }
        found: dict[str, dict[str, float]] = {}
        for uuid, handle in self._handles.items():
            for name, read in reads.items():
                try:
                    value = read(handle)
                except self._nvml.NVMLError:
                    continue
                found.setdefault(uuid, {})[name] = value
        return found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = {}


class SystemSampler:
    """Takes samples of a node and averages them, on one thread.

    A group that cannot be read is warned of once and left out from then on.
    """

    def __init__(self, device_uuids: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = Devices(device_uuids)
        self._disk_rates, self._network_rates = Rates(clock), Rates(clock)
        self._sources: dict[str, Callable[[], Mapping[str, Any]]] = {
            "gpu": self._devices.read,
            "cpu": _cpu,
            "memory": _memory,
            "disk": lambda: _disk(self._disk_rates),
            "network": lambda: _network(self._network_rates),
        }
        self._samples: dict[str, list[Mapping[str, Any]]] = {}
        self.num_samples = 0
        self.sample()  # of this first one only the counters are kept: nothing has happened since
        self.take()

    def sample(self) -> None:
        self.num_samples += 1
        for group, read in list(self._sources.items()):
            try:
                found = read()
            except Exception as error:  # noqa: BLE001  # psutil's errors have no common class, and none may end it
                del self._sources[group]
                logger.warning(
                    "system metrics of the group %r are not collected: %s: %s",
                    group,
                    type(error).__name__,
                    error,
                )
                continue
            if found:
                self._samples.setdefault(group, []).append(found)

    def take(self) -> dict[str, dict[str, Any]]:
        """Return the averages since the last call, by group."""
        samples, self._samples, self.num_samples = self._samples, {}, 0
        return {group: average(found) for group, found in samples.items()}

    def close(self) -> None:
        self._devices.close()


def _cpu() -> dict[str, float]:
    # Of all processors, in percent since this thread asked last.
    return {"cpu_util_simple": psutil.cpu_percent()}


def _memory() -> dict[str, float]:
    return {"memory_free": psutil.virtual_memory().available}


def _disk(rates: Rates) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counters = psutil.disk_io_counters()
    if counters is not None:  # a container may show no disk
        found = dict(
            rates.take(
                {
                    "disk_iops": counters.read_count + counters.write_count,
                    "disk_throughput_read": counters.read_bytes,
                    "disk_throughput_write": counters.write_bytes,
                }
            )
        )
    for path in _DISK_PATHS:
        try:
            found[path] = {"disk_util": psutil.disk_usage(path).percent}
        except OSError:
            continue
    return found


def _network(rates: Rates) -> dict[str, float]:
    counters = psutil.net_io_counters()
    if counters is None:
        return {}
    return rates.take(
        {"net_throughput_sent": counters.bytes_sent, "net_throughput_recv": counters.bytes_recv}
    )
