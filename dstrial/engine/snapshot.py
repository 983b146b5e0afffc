"""Copy state to host memory, so that another thread can write it to files later.

A file written later is bitwise equal to a file written at the time of the copy. For the copy, ``torch.save`` gets a pickle
module that captures the pickled bytes and the storages. For the write, ``torch.save`` gets a pickle module that replays the
bytes and the copied storages. DeepSpeed's ``save_checkpoint`` runs unchanged, with its barriers, but with a checkpoint engine
that copies. Some files are written at the time of the copy, because DeepSpeed writes them without a checkpoint engine:
``latest``, the conversion script, swap files of NVMe offload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import mmap
import pathlib
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from dstrial.engine.deepspeed_internals.engines import (
    CheckpointCommitInfo,
    CheckpointEngine,
    TorchCheckpointEngine,
)
from dstrial.engine.host_memory import available_bytes
from dstrial.engine.state import describe_rank, save_engine

logger = logging.getLogger("dstrial.engine")

_USABLE_SHARE = 0.9  # fraction of the available memory that copies may use; the rest is for training
_LOCKED_BYTES = 1 << 20  # smaller chunks are not page-locked, because locking takes tens of microseconds
_ALIGNMENT_BYTES = 64


class HostBuffers:
    """Host memory for the copies of one rank's state, reused by later saves.

    There is one chunk of memory per file. After each save, the chunks that this save did not use are freed.

    Args:
        num_sharers: number of ranks on this machine; each may use an equal share of the available memory.
        available: function that returns the available bytes of host memory, or None if they are unknown.
        device: the device of the state. For a CUDA device, chunks are page-locked for faster copies.
    """

    def __init__(
        self,
        num_sharers: int = 1,
        available: Callable[[], int | None] = available_bytes,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._num_sharers = num_sharers
        self._available = available
        self._device = device
        self._locks_pages = device is not None and device.type == "cuda"
        self._free: list[Any] = []  # NumPy arrays of bytes
        self._taken: list[Any] = []
        self._has_warned = False

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in [*self._free, *self._taken])

    def take(self, sizes: Sequence[int]) -> list[torch.UntypedStorage] | None:
        """Return one uninitialised buffer for each size in bytes.

        None if the available memory does not suffice; the first time, a warning is logged.
        """
        ends = np.cumsum([-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes], dtype=np.int64)
        num_bytes = int(ends[-1]) if sizes else 0
        # A small file must not take a large file's chunk, because the large file would then allocate another chunk.
        fitting = [chunk for chunk in self._free if num_bytes <= chunk.nbytes <= 2 * num_bytes]
        if fitting:
            chunk = min(fitting, key=lambda one: int(one.nbytes))
            self._free = [one for one in self._free if one is not chunk]
        elif not self._has_room(num_bytes):
            return None
        else:
            chunk = self._allocate(num_bytes)
        self._taken.append(chunk)
        starts = [0, *ends.tolist()]
        return [_storage(chunk[start : start + size]) for start, size in zip(starts, sizes, strict=False)]

    def _has_room(self, num_bytes: int) -> bool:
        available = self._available()
        if available is None or num_bytes <= _USABLE_SHARE * available / self._num_sharers:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the copy of the state that saving in the background needs does not fit into memory (%d MiB more, for each of "
                "%d ranks on this machine with %d MiB left): what does not fit is written while training waits",
                num_bytes >> 20,
                self._num_sharers,
                available >> 20,
            )
        return False

    def _allocate(self, num_bytes: int) -> Any:
        device = self._device
        if device is None or not self._locks_pages or num_bytes < _LOCKED_BYTES:
            # NumPy requests huge pages from the kernel. The first copy is several times faster than into torch's own memory.
            return np.empty(num_bytes, dtype=np.uint8)
        # torch's pinned memory is not used, because it rounds sizes up to a power of two. Whole pages are allocated, because a
        # page can be registered only once.
        num_paged = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = np.empty(num_paged + mmap.PAGESIZE - 1, dtype=np.uint8)
        start = -whole.ctypes.data % mmap.PAGESIZE
        address = whole.ctypes.data + start
        with torch.cuda.device(device):  # otherwise the runtime creates a context on the thread's device 0
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            error = int(runtime.cudaHostRegister(address, num_paged, 0))
            if error:
                # This launch clears the thread's last CUDA error, which a later launch would otherwise raise.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device)
        if error:
            self._locks_pages = False
            logger.warning(
                "CUDA has refused to lock %d MiB of host memory (error %d): saving in the background copies through ordinary "
                "memory, which takes longer. See `ulimit -l` and the memory that is left.",
                num_paged >> 20,
                error,
            )
        else:
            weakref.finalize(whole, _unlock, device, address).atexit = False
        return whole[start : start + num_bytes]

    def release(self) -> None:
        """End a save: make its chunks available to the next save, and free all others."""
        self._free, self._taken = self._taken, []

    def clear(self) -> None:
        self._free, self._taken = [], []


def _unlock(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _storage(array: Any) -> torch.UntypedStorage:
    tensor = torch.from_numpy(array) if array.nbytes else torch.empty(0, dtype=torch.uint8)
    return tensor.untyped_storage()


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """The content of one file to write later."""

    path: str
    through_python: bool  # write through a Python file object; the archive then lacks the file's name
    pickled: bytes  # ``torch.save``'s pickle of the value, without the content of storages
    storages: Sequence[torch.UntypedStorage]  # copies, in order of ``torch.save``'s numbers


class StateCopies:
    """Copies of the values that a rank will write to files.

    ``add`` raises no error, because other ranks may wait at DeepSpeed's next barrier; ``write`` raises the error later. If
    ``buffers`` is None, ``add`` copies nothing, and writes every value immediately.
    """

    def __init__(self, buffers: HostBuffers | None) -> None:
        self._buffers = buffers
        self._files: list[_File] = []
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a call of ``add`` has failed, so that ``write`` will raise its error."""
        return self._error is not None

    def add(self, value: Any, path: str, *, through_python: bool = False) -> None:
        """Copy ``value``; if memory for a copy is short, write the file immediately.

        A no-op after an earlier call has failed.

        Args:
            value: a value for ``torch.save``, which saves the whole storage of each tensor.
            path: the file to write.
            through_python: whether to write through a Python file object, whose errors state the cause.
        """
        if self._error is not None:
            return
        try:
            if self._buffers is None or not self._copy(self._buffers, value, path, through_python):
                _save(value, path, through_python, pickle)
        except Exception as error:  # noqa: BLE001  # raised by write(), once all ranks have passed their barriers
            self._error = error

    def _copy(self, buffers: HostBuffers, value: Any, path: str, through_python: bool) -> bool:
        pickled, storages = _pickled_by_torch(value)
        copies = buffers.take([storage.nbytes() for storage in storages])
        if copies is None:
            return False
        for copy, storage in zip(copies, storages, strict=True):
            if storage.nbytes():
                copy.copy_(storage, non_blocking=True)
        if any(storage.device.type != "cpu" for storage in storages):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        self._files.append(_File(path, through_python, pickled, copies))
        return True

    def write(self) -> None:
        """Write the copies to their files in order, and release the buffers.

        Raises the error if a call of ``add`` has failed; then no file is written. The first error of a write is raised too, and
        ends the writing. May be called from any thread, but not by two threads at the same time.
        """
        try:
            if self._error is not None:
                raise self._error
            while self._files:
                file = self._files.pop(0)
                _save(file, file.path, file.through_python, _ReplayingModule)
        finally:
            self._files.clear()
            if self._buffers is not None:
                self._buffers.release()


def _save(value: Any, path: str, through_python: bool, pickle_module: Any) -> None:
    if not through_python:
        torch.save(value, path, pickle_module=pickle_module)
        return
    with pathlib.Path(path).open("wb") as file:
        torch.save(value, file, pickle_module=pickle_module)


# ---- pickle modules ----------------------------------------------------------------------------------


class _Pickled(Exception):  # noqa: N818  # not an error: stops torch.save after pickling
    def __init__(self, pickled: bytes, storages: tuple[torch.UntypedStorage, ...]) -> None:
        super().__init__()
        self.pickled = pickled
        self.storages = storages


def _pickled_by_torch(value: Any) -> tuple[bytes, tuple[torch.UntypedStorage, ...]]:
    try:
        torch.save(value, io.BytesIO(), pickle_module=_CapturingModule)
    except _Pickled as done:
        return done.pickled, done.storages
    raise RuntimeError("torch.save has not pickled with the module that it was given")


class _TorchPickler:
    """Base class of picklers; ``torch.save`` sets their ``persistent_id``."""

    persistent_id: Callable[[Any], Any]

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        self._file = file
        self._protocol = protocol


class _Recorder(pickle.Pickler):
    """Pickler that records the storages to which torch's ``persistent_id`` gives ids."""

    def __init__(self, file: io.BytesIO, protocol: int, persistent_id: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=protocol)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._persistent_id_of_torch = persistent_id

    def persistent_id(self, obj: Any) -> Any:
        pid = self._persistent_id_of_torch(obj)
        if pid is not None:
            storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
            self.storages.setdefault(storage._cdata, storage)
        return pid


class _Capturing(_TorchPickler):
    """Pickles the value, then raises ``_Pickled`` to stop ``torch.save``."""

    def dump(self, value: Any) -> None:
        recorder = _Recorder(self._file, self._protocol, self.persistent_id)
        recorder.dump(value)
        raise _Pickled(self._file.getvalue(), tuple(recorder.storages.values()))


class _Replaying(_TorchPickler):
    """Writes the captured pickle; makes torch number the copied storages as before."""

    def dump(self, file: _File) -> None:
        for storage in file.storages:
            self.persistent_id(storage)
        self._file.write(file.pickled)


class _CapturingModule:
    Pickler = _Capturing


class _ReplayingModule:
    Pickler = _Replaying


# ---- engines -----------------------------------------------------------------------------------------


def copy_engine(engine: DeepSpeedEngine, path: str | pathlib.Path, tag: str, copies: StateCopies) -> None:
    """Copy to ``copies`` the state that ``save_engine`` would write.

    Call between two optimizer steps. If DeepSpeed does not write with ``torch.save`` (fast, decoupled or DataStates checkpoint
    engine), or writes torch's old format, ``save_engine`` is called immediately instead.

    Ranks: all, collectively.
    """
    own = engine.checkpoint_engine
    if type(own) is not TorchCheckpointEngine or not own.zipfile_serialization:
        logger.info("%s writes through DeepSpeed's %s: at once", describe_rank(engine), type(own).__name__)
        save_engine(engine, path, tag)
        return
    engine.checkpoint_engine = _CopyingCheckpointEngine(own, copies)
    try:
        engine.save_checkpoint(str(path), tag=tag)
    finally:
        engine.checkpoint_engine = own


class _CopyingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # deepspeed ships no types
    """Checkpoint engine that copies values instead of calling ``torch.save``."""

    def __init__(self, own: TorchCheckpointEngine, copies: StateCopies) -> None:
        self.name = own.name
        self._own = own
        self._copies = copies

    def create(self, info: CheckpointCommitInfo) -> None:
        self._own.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        self._copies.add(state_dict, str(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._own.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> Any:
        return self._own.commit(info)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._own.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        return bool(self._own.preserves_storage_sharing())
