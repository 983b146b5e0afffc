"""Measure a rank's time, memory and FLOPs; on rank 0, write those of all ranks.

Measuring neither synchronises devices nor communicates. The training loop sends the measurements of all ranks to rank 0, in the
same message as the training metrics that it reports.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from dstrial.engine.deepspeed_internals.engines import compute_dtype
from dstrial.engine.engine_hooks import observe_engines
from dstrial.engine.model_flops import FlopCount, FlopCounter, why_uncountable
from dstrial.telemetry.memory import FirstBatchMemory, memory_now
from dstrial.telemetry.phase_timer import Event, PhaseTimer
from dstrial.telemetry.samples import RankSample, RunTotals, report_metrics
from dstrial.trial.trial import tokens_in

logger = logging.getLogger("dstrial.telemetry")

ResultT = TypeVar("ResultT")

_KEEP_PERIOD_S = 5.0  # minimum time between writes of the run's totals, which take longer than a report

_DATA_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "float32": 51.0}),
    ("H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "float32": 60.0}),
    ("H100", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.05, "float16": 362.05, "float32": 91.6}),
    ("L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3}),
    ("A10", {"bfloat16": 125.0, "float16": 125.0, "float32": 31.2}),
    ("T4", {"float16": 65.0, "float32": 8.1}),
    ("V100", {"float16": 125.0, "float32": 15.7}),
    ("MI300X", {"bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4}),
)
"""Pairs (words of a device's name, type -> TFLOPS for dense matrices without TF32); the first pair that matches is used.

Source: NVIDIA's data sheets of H100 and H200 (half of the figures "with sparsity"), A100, L40S, L4, A10, T4, V100 (SXM2), and
AMD's of MI300X.
"""


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak FLOP/s from its data sheet.

    ``device`` is the name that torch reports, and ``dtype`` a type such as ``bfloat16``. Return None if the table
    ``_DATA_SHEETS`` lacks the device or the type.
    """
    words = device.replace("-", " ").split()
    for name, figures in _DATA_SHEETS:
        if all(word in words for word in name.split()):
            return figures[dtype] * 1e12 if dtype in figures else None
    return None


def timed_events(accelerator: Any) -> Callable[[], Event] | None:
    """Return a factory of timed device events; None if the accelerator has no events.

    Source: DeepSpeed's ``accelerator.Event``, ``torch.cuda.Event`` on CUDA, None on the CPU.
    """
    kind = accelerator.Event
    return None if kind is None else functools.partial(kind, enable_timing=True)


class AsyncSample:
    """A ``RankSample`` whose gradient norm is still being copied from the device.

    The constructor starts the copy and does not wait.

    Args:
        sample: all other fields of the ``RankSample``.
        norm: the gradient norm, a number or a tensor; None if unknown.
    """

    def __init__(self, sample: dict[str, Any], norm: Any) -> None:
        self._sample = sample
        self._norm = norm
        self._is_copied: Any = None
        if isinstance(norm, torch.Tensor) and norm.device.type == "cuda":
            host = torch.empty((), dtype=norm.dtype, pin_memory=True)
            with torch.cuda.device(norm.device):
                host.copy_(norm.detach().reshape(()), non_blocking=True)
                self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._is_copied.record()
            self._norm = host

    def wait(self) -> RankSample:
        """Wait for the copy of the gradient norm; return the complete sample."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        norm = None if self._norm is None else float(self._norm)
        return RankSample(gradient_norm=norm, **self._sample)


class Instruments(contextlib.AbstractContextManager["Instruments"]):
    """Context manager that measures one rank's training: time, tokens, FLOPs, memory.

    Args:
        engines: the trial's DeepSpeed engines.
        replica: index of this rank's data-parallel replica.
        count_tokens: function that returns the number of tokens in a micro batch, or None if unknown.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        replica: int,
        *,
        count_tokens: Callable[[Any], int | None] = tokens_in,
    ) -> None:
        self._engines = engines
        self._replica = replica

        self._accelerator = get_accelerator()
        self._device = torch.device(self._accelerator.current_device_name())
        self._timer = PhaseTimer(timed_events(self._accelerator))
        # With sequence parallelism, a rank's loader may yield only a part of each sequence.
        self._counts_tokens = engines[0].sequence_parallel_size == 1
        self._count_tokens = count_tokens
        self._num_tokens: int | None = 0
        self._data_wait_s = 0.0
        self._knows_data_wait = True
        self._seconds = 0.0
        self._start = 0
        self._counter: FlopCounter | None = None
        self._flops: FlopCount | None = None
        self._memory = FirstBatchMemory(engines, self._accelerator)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Instruments:
        self._stack.callback(self._timer.close)
        self._stack.enter_context(observe_engines(self._timer))
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    # ---- calls of the loop ---------------------------------------------------------------------------

    def begin(self, batches_trained: int, *, reads_whole_records: bool = False) -> None:
        """Set the number of batches that were trained before the measurement.

        With sequence parallelism, tokens are counted only if ``reads_whole_records`` is true: each rank's loader yields whole
        sequences, not parts.
        """
        self._start = batches_trained
        self._counts_tokens |= reads_whole_records

    def switch(self, is_training: bool) -> None:
        self._timer.switch(is_training)

    def on_batch_loaded(self, micro_batch: Any, seconds: float) -> None:
        """Count a micro batch's tokens, and the ``seconds`` of waiting for the loader."""
        self._data_wait_s += seconds
        if self._num_tokens is not None and self._counts_tokens:
            tokens = self._tokens_of(micro_batch)
            self._num_tokens = None if tokens is None else self._num_tokens + tokens

    def _tokens_of(self, micro_batch: Any) -> int | None:
        try:
            tokens = self._count_tokens(micro_batch)
            if tokens is None or (isinstance(tokens, int) and tokens >= 0):
                return tokens
            problem = f"it returned {tokens!r}; expected an integer of at least 0, or None"
        except Exception as error:  # noqa: BLE001  # a trial's own code; instruments never end a training
            problem = f"{type(error).__name__}: {error}"
        logger.warning("tokens are not counted any more: get_num_tokens of the trial: %s", problem)
        self._counts_tokens = False
        return None

    def without_loader(self) -> None:
        """Report data wait and FLOPs as unknown, because the user's script loads data."""
        self._knows_data_wait = False
        self._flops = FlopCount(0.0, unknown="the script draws its records itself")

    def first_batch(self, train_batch: Callable[..., ResultT]) -> Callable[..., ResultT]:
        """Return a function that calls ``train_batch`` and counts FLOPs and memory.

        Use the returned function for the first batch only: counting takes some microseconds per operation.
        """
        counter = self.counting()

        def counted(*args: Any) -> ResultT:
            with counter:
                return train_batch(*args)

        return counted

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Return a reusable context manager in which FLOPs and memory are counted.

        If FLOPs cannot be counted, only memory is measured.
        """
        unknown = why_uncountable(self._engines)
        self._timer.entering = self._memory.entering
        if unknown is not None:
            self._flops = FlopCount(0.0, unknown=unknown)
            self._memory.begin(None)
            self._timer.around_step = self._memory.around_step
            return contextlib.nullcontext()
        self._counter = counter = FlopCounter()
        self._memory.begin(counter)
        self._timer.around_step = lambda call: counter.paused(lambda: self._memory.around_step(call))
        return counter

    def end_first_batch(self, batches_trained: int, seconds: float) -> None:
        """End the counting of FLOPs and memory; drop all other measurements so far.

        ``batches_trained`` includes the first batch, which took ``seconds``.
        """
        if self._counter is not None:
            self._flops = self._counter.count
            self._counter = None
        self._timer.around_step = self._timer.entering = None
        self._memory.end()
        if self._flops is not None and not self._flops.total and self._flops.unknown is None:
            self._flops = FlopCount(0.0, unknown="no operation with a formula was seen")
        self._timer.forget()
        self._num_tokens, self._data_wait_s = 0, 0.0
        self._start = batches_trained
        self._seconds -= seconds

    def trained(self, seconds: float) -> None:
        """Add ``seconds`` of training time.

        Add the first batch's time too, because ``end_first_batch`` subtracts it.
        """
        self._seconds += seconds

    def sample(self, batches_trained: int) -> AsyncSample:
        """Return the measurements since the last call, and reset them.

        ``batches_trained`` is the number of batches trained so far.
        """
        num_batches = batches_trained - self._start
        tokens = self._num_tokens if self._counts_tokens and self._num_tokens else None
        flops = self._flops
        engine = self._engines[0]
        rates = engine.get_lr() if getattr(engine, "optimizer", None) is not None else None
        rate = rates[0] if rates else None
        sample = {
            "num_batches": num_batches if self._seconds > 0 else 0,
            "seconds": self._seconds,
            "data_wait_s": self._data_wait_s if self._knows_data_wait else None,
            "phase_s": self._timer.take(),
            "clock": self._timer.clock_name,
            "num_tokens": tokens,
            "replica": self._replica,
            "memory_bytes": memory_now(self._accelerator) | self._memory.bytes(),
            "memory_found_by": self._memory.found_by,
            "flops": None if flops is None or flops.unknown else (flops.total, flops.recomputed),
            "flops_unknown": None if flops is None else flops.unknown,
            "learning_rate": float(rate) if isinstance(rate, (int, float)) else None,
        }
        self._start, self._seconds, self._data_wait_s, self._num_tokens = batches_trained, 0.0, 0.0, 0
        return AsyncSample(sample, engine.get_global_grad_norm())

    @property
    def peak_flops_per_s(self) -> float | None:
        """The data sheet's peak FLOP/s of this rank's device; None if unknown."""
        if self._device.type != "cuda":
            return None
        dtype = str(compute_dtype(self._engines[0])).removeprefix("torch.")
        return peak_flops(torch.cuda.get_device_name(self._device), dtype)


class TelemetryReports:
    """Writes telemetry reports and a run's totals from all ranks' samples.

    Args:
        record: function that writes a report, given the batch number and the metrics.
        keep: function that stores the run's totals, given as JSON values.
        peak_flops_per_s: the device's peak FLOP/s; None if unknown.

    Ranks: only rank 0.
    """

    def __init__(
        self,
        record: Callable[[int, dict[str, Any]], None],
        keep: Callable[[Mapping[str, Any]], None],
        peak_flops_per_s: float | None,
    ) -> None:
        self._record = record
        self._keep = keep
        self._peak = peak_flops_per_s
        self._totals = RunTotals()
        self._has_failed = False
        self._kept_s = -_KEEP_PERIOD_S

    def write(
        self, samples: Sequence[RankSample], batches_trained: int, num_records: int, num_skipped: int
    ) -> None:
        """Write a report, and store the totals if they are older than 5 s. Never raises.

        Args:
            samples: one sample per rank.
            batches_trained: number of batches trained so far.
            num_records: number of records, over all replicas, in the batches that the samples measure.
            num_skipped: number of optimizer steps skipped in the run so far.
        """
        try:
            self._totals.add(samples, num_records)
            self._record(batches_trained, report_metrics(samples, num_records, num_skipped, self._peak))
            if time.monotonic() - self._kept_s >= _KEEP_PERIOD_S:
                self._keep_totals()
        except Exception as error:  # noqa: BLE001  # instruments never end a training
            self._warn(error)

    def keep(self) -> None:
        """Store the current totals; never raises."""
        try:
            self._keep_totals()
        except Exception as error:  # noqa: BLE001  # likewise
            self._warn(error)

    def _keep_totals(self) -> None:
        self._kept_s = time.monotonic()
        self._keep(self._totals.to_json(self._peak))

    def _warn(self, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(
                "telemetry could not be written (%s: %s); training continues",
                type(error).__name__,
                error,
            )
        self._has_failed = True
