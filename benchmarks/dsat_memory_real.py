"""The most bytes that a real DeepSpeed engine has allocated at once, from torch's profiler; one process per engine."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dstrial.engine.dryrun import patches
from dstrial.engine.dryrun.measure import ModelWorkload
from dstrial.ranks.process_group import without_compiled_collectives

NUM_STEPS = 3


def peak_bytes(
    shape: dict[str, Any], config: dict[str, Any], micro_batch_size: int, world_size: int, is_virtual: bool
) -> int:
    """Build an engine, train some steps and return the peak of all tensors' bytes.

    Args:
        shape: of the model, see ``gpt_model.Shape``.
        config: DeepSpeed config without micro batch size.
        micro_batch_size: records of a micro batch.
        world_size: number of ranks.
        is_virtual: whether this process is the only rank, and the others pretended; else ranks are those of the environment.

    Ranks: all, or the only one.
    Source: torch's profiler notes each call of the CPU allocator.
    """
    torch.set_num_threads(1)
    config = copy.deepcopy(config)
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    workload = ModelWorkload("gpt_model:model", "gpt_model:batch")
    workload.prepare(shape)
    with contextlib.ExitStack() as stack:
        if is_virtual:
            stack.enter_context(patches.without_shared_memory_op())
            stack.enter_context(patches.virtual_world(world_size))
        else:
            torch.distributed.init_process_group("gloo")
            stack.callback(torch.distributed.destroy_process_group)
            stack.enter_context(without_compiled_collectives(is_cpu=True))
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            FreesElsewhere() as elsewhere,
        ):
            workload.build(config, torch.device("cpu"))
            for _ in range(NUM_STEPS * config["gradient_accumulation_steps"]):
                workload.train_micro_batch(micro_batch_size)
    return highest(profiler, elsewhere.changes)


class FreesElsewhere(TorchDispatchMode):  # type: ignore[misc]  # torch's class is untyped
    """Notes what other threads free, of which the profiler knows nothing: gloo's own threads sometimes hold a tensor longest."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        self._alive: dict[int, Any] = {}
        self._own_thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._alive:
                    self._alive[key] = weakref.ref(storage, functools.partial(self._freed, key, size))
        return result

    def _freed(self, key: int, size: int, _reference: object) -> None:
        del self._alive[key]
        if threading.get_ident() != self._own_thread:
            self.changes.append((time.time_ns(), -size))


def highest(profiler: Any, elsewhere: list[tuple[int, int]]) -> int:
    """Return the most bytes alive at once of those that were allocated while a profile was taken.

    Args:
        profiler: torch's, with memory events.
        elsewhere: ``changes`` of ``FreesElsewhere``, entered at the same time.
    """
    changes = sorted(
        [
            *elsewhere,
            *(
                (event.start_ns(), event.nbytes())
                for event in profiler.profiler.kineto_results.events()
                if event.name() == "[memory]"
            ),
        ]
    )
    alive = peak = 0
    for _, num_bytes in changes:
        alive += num_bytes
        peak = max(peak, alive)
    return peak
