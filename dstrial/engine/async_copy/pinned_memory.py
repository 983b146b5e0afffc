"""Host memory for copies of state, page-locked if a CUDA device copies into it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import Any, Protocol

import numpy as np
import torch

logger = logging.getLogger("dstrial.engine")

_LARGE_BYTES = 1 << 20
_SLAB_BYTES = 4 << 20
_ALIGNMENT_BYTES = 64


class HostMemory(Protocol):
    """Where buffers come from."""

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return an uninitialised storage of this size; any thread, one at a time."""
        ...

    def forget(self) -> None:
        """Keep nothing for later; allocated storages stay valid."""
        ...


class PageableMemory:
    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        # numpy asks the kernel for huge pages, which makes the first copy several times faster than into torch's own memory.
        return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).untyped_storage()

    def forget(self) -> None: ...


class LockingRuntime(Protocol):
    """What locks pages for a device."""

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the device is the calling thread's current one."""
        ...

    def register(self, address: int, num_bytes: int) -> int:
        """Lock pages; return 0, or the error's number."""
        ...

    def unregister(self, address: int) -> None: ...

    def clear_error(self) -> None:
        """Take the calling thread's last error, so that nothing later is blamed for it."""
        ...


class CudaRuntime:
    """Locks pages through the CUDA runtime, for a device with its index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def register(self, address: int, num_bytes: int) -> int:
        return int(self._runtime().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> None:
        self._runtime().cudaHostUnregister(address)

    def clear_error(self) -> None:
        """See :class:`LockingRuntime`.

        torch's binding has no ``cudaGetLastError`` (torch/csrc/cuda/shared/cudart.cpp), but every kernel launch calls and
        thereby resets it (c10/cuda/CUDAException.h, ``C10_CUDA_KERNEL_LAUNCH_CHECK``).
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped


class PinnedMemory:
    """Memory locked for fast device copies; ordinary once a device refuses to lock.

    Buffers of 1 MiB and more are registered one by one, smaller ones lie in slabs of 4 MiB: a registration takes tens of
    microseconds, and models have thousands of small tensors. A registered range begins and ends at a page of its own, because
    a page can be registered once only (``cudaErrorHostMemoryAlreadyRegistered``, 712). It is not torch's pinned memory, which
    rounds sizes up to a power of two.
    """

    def __init__(self, runtime: LockingRuntime) -> None:
        self._runtime = runtime
        self._pageable = PageableMemory()
        self._is_refused = False
        self._slab: Any = np.empty(0, dtype=np.uint8)
        self._num_used = 0

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if num_bytes < _LARGE_BYTES:
            if self._num_used + num_bytes > self._slab.nbytes:
                self._slab, self._num_used = self._locked(_SLAB_BYTES), 0
            array = self._slab[self._num_used : self._num_used + num_bytes]
            self._num_used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        else:
            array = self._locked(num_bytes)
        if array.nbytes < num_bytes:
            return self._pageable.allocate(num_bytes)
        return torch.from_numpy(array).untyped_storage()

    def forget(self) -> None:
        self._slab, self._num_used = np.empty(0, dtype=np.uint8), 0

    def _locked(self, num_bytes: int) -> Any:
        """Return an array in locked pages; an empty one if they cannot be locked."""
        nothing = np.empty(0, dtype=np.uint8)
        if self._is_refused:
            return nothing
        num_paged = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = np.empty(num_paged + mmap.PAGESIZE - 1, dtype=np.uint8)
        start = -whole.ctypes.data % mmap.PAGESIZE
        address = whole.ctypes.data + start
        # A thread's current device is 0 until it is told otherwise, and the runtime makes a context on the current device.
        with self._runtime.on_device():
            error = self._runtime.register(address, num_paged)
            if error:
                self._is_refused = True
                self._runtime.clear_error()
        if error:
            logger.warning(
                "CUDA has refused to lock %d MiB of host memory (error %d): saving in the background copies through ordinary "
                "memory, which takes longer. See `ulimit -l` and the memory that is left.",
                num_paged >> 20,
                error,
            )
            return nothing
        weakref.finalize(whole, _unlock, self._runtime, address).atexit = False
        return whole[start : start + num_bytes]


def _unlock(runtime: LockingRuntime, address: int) -> None:
    with runtime.on_device():
        runtime.unregister(address)


def host_memory_for(device: torch.device) -> HostMemory:
    return PinnedMemory(CudaRuntime(device)) if device.type == "cuda" else PageableMemory()
