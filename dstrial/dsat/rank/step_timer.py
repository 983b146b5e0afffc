"""Time whole steps of a running training, and count its FLOPs and memory.

In the first step, FLOPs and saved activations are counted. Then windows (several consecutive steps) are timed until the median
is precise enough; the device is synchronised only at the edges of a window. In the last three steps, forward, backward and
optimizer step are timed separately. Rank 0 decides when each part ends.
"""

from __future__ import annotations

import contextlib
import enum
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from dstrial.dsat.core.outcome import HIGHEST_EXPECTED, LOWEST_EXPECTED, Measured
from dstrial.dsat.rank.statistics import Sampling, SamplingLimits
from dstrial.engine.adapters.batch_sizes import dims_of
from dstrial.engine.deepspeed_internals.optimizers import full_numel
from dstrial.engine.model_flops import FlopCounter

_NUM_PHASE_STEPS = 3  # last steps, of which the phases are timed separately
_MAX_SKIPPED_SHARE = 0.5  # of a window's steps; if more are skipped for overflow, the measurement fails


class Mode(enum.IntEnum):
    """Parts of a measurement, in order: count FLOPs, time steps, time phases, end."""

    PROFILE = 0
    WINDOW = 1
    PHASES = 2
    DONE = 3


class MeasurementDone(SystemExit):
    """Exits the process with status 0 when enough steps are measured."""


class NumericError(ArithmeticError):
    """The loss is not finite, or most steps are skipped for overflow."""


class FirstMicroBatch:
    """FLOPs and bytes of saved activations in the first micro batch of each engine."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.flops_recomputed = 0.0
        self.activation_bytes = 0.0
        self._seen: set[tuple[str, int]] = set()

    def run(self, phase: str, engine: Any, call: Callable[[], Any], *, is_outermost: bool) -> Any:
        """Return ``call()``; count its FLOPs if it is an engine's first call of a phase.

        ``is_outermost`` is false for a call inside another phase, as in a pipeline's ``train_batch``. The FLOPs of such a call
        are counted with the other phase.
        """
        key = phase, id(engine)
        if key in self._seen:
            return call()
        self._seen.add(key)
        saved_bytes: dict[int, int] = {}
        weights = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    saved_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks: Any = contextlib.nullcontext()
        if phase == "forward":
            hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, FlopCounter() as counter:
            result = call()
        if phase == "forward":
            self.activation_bytes += sum(saved_bytes.values())
        if is_outermost:
            num_micro_batches = max(int(engine.micro_batches), 1) if phase == "train_batch" else 1
            self.flops += counter.total / num_micro_batches
            self.flops_recomputed += counter.recomputed / num_micro_batches
        return result


class StepTimer:
    """Measures the steps of a rank's engines while they train.

    The last measured step raises ``MeasurementDone``, which ends the process.
    """

    def __init__(self, limits: SamplingLimits) -> None:
        self._sampling = Sampling(limits)
        self._engines: list[Any] = []
        self._accelerator = get_accelerator()
        self._steps_left = 1
        self._started_s = 0.0
        self._first = FirstMicroBatch()
        self._phase_s: dict[str, float] = {}
        self._phase_peak_bytes: dict[str, float] = {}
        self._peak_bytes = (0.0, 0.0)
        self._last_loss: Any = None
        self._skipped_before = 0
        self._depth = 0
        self.num_observed_steps = 0  # of the first engine
        self._window_steps = 1
        self.mode = Mode.PROFILE
        self.phase = "init"

    @property
    def dtype(self) -> torch.dtype:
        parameter = next(iter(self._engines[0].module.parameters()), None)
        return torch.float32 if parameter is None else parameter.dtype

    def run(self, phase: str, engine: Any, call: Callable[[], Any]) -> Any:
        """Return ``call()``, which is one phase of a step of ``engine``.

        In the first step the FLOPs of the call are counted, in the last steps its time is measured; in other steps the
        call just runs.

        Ranks: all, collectively.
        """
        if engine not in self._engines:
            self._engines.append(engine)
        self.phase = phase
        self._depth += 1
        try:
            if self.mode is Mode.PROFILE and phase != "step":
                result = self._first.run(phase, engine, call, is_outermost=self._depth == 1)
            elif self.mode is Mode.PHASES:
                result = self._timed(phase, call)
            else:
                result = call()
        finally:
            self._depth -= 1
        if phase in ("backward", "train_batch") and isinstance(result, torch.Tensor):
            self._last_loss = result.detach()
        return result

    def stepped(self, engine: Any) -> None:
        """Count a step; after enough steps, rank 0 decides what all ranks measure next.

        Steps of other engines than the first are ignored.

        Raises:
            MeasurementDone: enough steps are measured.

        Ranks: all, collectively.
        """
        self.phase = "training"
        if engine is not self._engines[0] or self.mode is Mode.DONE:
            return
        self.num_observed_steps += 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        if self._end_window() is Mode.DONE:
            raise MeasurementDone(0)

    def result(self) -> Measured:
        """Return this rank's measurement; the search uses that of rank 0."""
        engine = self._engines[0]
        median_s, half_width = self._sampling.median()
        least_s, most_s = self._sampling.range_s()
        micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        records = micro * accumulation * dims_of(engine).dp
        metrics: dict[str, float] = {
            "throughput": records / median_s,
            "end_to_end_throughput": records / self._sampling.mean_s(),
            LOWEST_EXPECTED: records / most_s,
            HIGHEST_EXPECTED: records / least_s,
            "latency": median_s * 1e6,
            "half_width": half_width,
            "num_steps": self._sampling.num_steps,
            "train_batch_size": records,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "zero_stage": float(int(engine.zero_optimization_stage())),
            "num_engines": float(len(self._engines)),
        }
        first = self._first
        if first.flops:
            model = first.flops - first.flops_recomputed
            metrics["FLOPS_per_gpu"] = model * accumulation / median_s
            metrics["hardware_FLOPS_per_gpu"] = first.flops * accumulation / median_s
        for phase, seconds in self._phase_s.items():
            if phase != "train_batch":
                metrics[phase] = seconds / _NUM_PHASE_STEPS * 1e6
        metrics |= {f"{phase}_peak_memory_bytes": peak for phase, peak in self._phase_peak_bytes.items()}
        return Measured(metrics | self._model_metrics(micro) | self._memory_metrics())

    def _model_metrics(self, micro_batch_size: int) -> dict[str, float]:
        # A rank of a pipeline has the parameters of its stage only.
        params = [param for engine in self._engines for param in engine.module.parameters()]
        sizes = [float(full_numel(param)) for param in params]
        metrics = {
            "num_params": sum(sizes),
            "num_trainable_params": sum(
                size for size, param in zip(sizes, params, strict=True) if param.requires_grad
            ),
        }
        if self._first.activation_bytes:
            metrics["activation_bytes_per_record"] = self._first.activation_bytes / micro_batch_size
        return metrics

    def _memory_metrics(self) -> dict[str, float]:
        metrics = {"host_peak_memory_bytes": _host_peak_bytes()}
        if not self._is_cpu:
            metrics["peak_memory_bytes"], metrics["peak_reserved_bytes"] = self._peak_bytes
            # Older versions of torch cannot tell the share that set_per_process_memory_fraction has set.
            share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
            is_cuda = self._accelerator.device_name() == "cuda"
            metrics["device_memory_bytes"] = self._accelerator.total_memory() * (share() if is_cuda else 1.0)
        return metrics

    @property
    def _is_cpu(self) -> bool:
        return str(self._accelerator.device_name()) == "cpu"

    def allocated_bytes(self) -> int | None:
        """Return the bytes that torch has allocated on the device; None on the CPU."""
        return None if self._is_cpu else int(self._accelerator.memory_allocated())

    def _synchronize(self) -> float:
        """Wait for the device; return the time of ``time.perf_counter``."""
        if not self._is_cpu:
            self._accelerator.synchronize()
        return time.perf_counter()

    def _end_window(self) -> Mode:
        seconds = self._synchronize() - self._started_s
        if self.mode is Mode.WINDOW:
            self._sampling.add(self._window_steps, seconds)
            self._require_numbers()
        mode, steps = self._agree(*self._next())
        if mode is not Mode.WINDOW and self.mode is Mode.WINDOW and not self._is_cpu:
            accelerator = self._accelerator
            self._peak_bytes = (
                float(accelerator.max_memory_allocated()),
                float(accelerator.max_memory_reserved()),
            )
        self.mode, self._steps_left, self._window_steps = mode, steps, steps
        self._started_s = self._synchronize()
        return mode

    def _next(self) -> tuple[Mode, int]:
        if self.mode in (Mode.PROFILE, Mode.WINDOW):
            steps = self._sampling.next_steps()
            return (Mode.WINDOW, steps) if steps else (Mode.PHASES, _NUM_PHASE_STEPS)
        return Mode.DONE, 0

    def _agree(self, mode: Mode, steps: int) -> tuple[Mode, int]:
        """Return rank 0's (mode, number of steps) on all ranks. Ranks: all, collectively."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return mode, steps
        decision = torch.tensor([int(mode), steps], device=self._accelerator.current_device_name())
        torch.distributed.broadcast(decision, src=0)
        return Mode(int(decision[0])), int(decision[1])

    def _require_numbers(self) -> None:
        loss = self._last_loss
        if loss is not None and not bool(torch.isfinite(loss).all()):
            raise NumericError(
                f"the loss is {loss.flatten()[0].item()} after {self._engines[0].global_steps} steps"
            )
        engine = self._engines[0]
        skipped = int(engine.skipped_steps) - self._skipped_before
        self._skipped_before += skipped
        if self._window_steps >= 4 and skipped > _MAX_SKIPPED_SHARE * self._window_steps:
            raise NumericError(f"{skipped} of {self._window_steps} steps were skipped for overflow")

    def _timed(self, phase: str, call: Callable[[], Any]) -> Any:
        if not self._is_cpu:
            self._accelerator.reset_peak_memory_stats()
        started_s = self._synchronize()
        result = call()
        self._phase_s[phase] = self._phase_s.get(phase, 0.0) + self._synchronize() - started_s
        if not self._is_cpu:
            peak = float(self._accelerator.max_memory_allocated())
            self._phase_peak_bytes[phase] = max(self._phase_peak_bytes.get(phase, 0.0), peak)
        return result


def _host_peak_bytes() -> float:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    kib = int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024.0
