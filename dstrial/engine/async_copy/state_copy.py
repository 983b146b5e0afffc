"""Copies of state in host memory, taken at once, written later by another thread.

The written file has the bits of one written at the moment of copying: ``torch.save`` pickles the value at once, through a
pickle module that keeps the bytes and copies the storages; later it is given a pickle module that returns both.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dstrial.engine.async_copy.host_memory import available_bytes
from dstrial.engine.async_copy.pinned_memory import HostMemory, PageableMemory
from dstrial.engine.deepspeed_internals.engines import clone_tensors_for_torch_save

logger = logging.getLogger("dstrial.engine")

_USABLE_SHARE = 0.9


class HostBuffers:
    """Host memory for the copies of one rank's state, used again by every save.

    It grows to one copy of the state: a buffer belongs to one storage, and those that the newest save did not use are freed.

    Args:
        num_sharers: ranks on this machine that allocate at the same time.
        available: returns how many bytes the machine has left; None if it does not say.
        memory: where buffers come from; ordinary memory if None.
    """

    def __init__(
        self,
        num_sharers: int = 1,
        available: Callable[[], int | None] = available_bytes,
        *,
        memory: HostMemory | None = None,
    ) -> None:
        self._num_sharers = num_sharers
        self._available = available
        self._memory = memory or PageableMemory()
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._taken: list[torch.UntypedStorage] = []
        self._has_said = False
        self._preparing: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        self._end_preparing()
        free = sum(size * len(buffers) for size, buffers in self._free.items())
        return free + sum(buffer.nbytes() for buffer in self._taken)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Allocate buffers in a thread, ahead of the first save, if there is room.

        A wrong guess costs time or, until the first save, memory, and nothing else.
        """
        if self._free or self._taken or self._preparing is not None or not self.has_room(sizes):
            return

        def allocate() -> None:
            for size in sizes:
                buffer = self._allocate(size)
                # The kernel gives memory only when it is written to.
                torch.empty(0, dtype=torch.uint8).set_(buffer).zero_()
                self._free.setdefault(size, []).append(buffer)

        self._preparing = threading.Thread(target=allocate, name="dstrial-save-buffers", daemon=True)
        self._preparing.start()

    def _end_preparing(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.join()

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Return whether buffers of these sizes in bytes fit; log once when not."""
        self._end_preparing()
        missing_bytes = 0
        wanted: dict[int, int] = {}
        for size in sizes:
            wanted[size] = wanted.get(size, 0) + 1
        for size, count in wanted.items():
            missing_bytes += size * max(count - len(self._free.get(size, ())), 0)
        if not missing_bytes:
            return True
        available = self._available()
        if available is None or missing_bytes <= _USABLE_SHARE * available / self._num_sharers:
            return True
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "the copy of the state that saving in the background needs does not fit into memory (%d MiB more, for each of "
                "%d ranks on this machine with %d MiB left): what does not fit is written while training waits",
                missing_bytes >> 20,
                self._num_sharers,
                available >> 20,
            )
        return False

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return an uninitialised buffer of exactly this size."""
        self._end_preparing()
        free = self._free.get(num_bytes)
        buffer = free.pop() if free else self._allocate(num_bytes)
        self._taken.append(buffer)
        return buffer

    def release(self) -> None:
        """Take back all buffers for the next save; free those that this one did not use."""
        self._end_preparing()
        self._free = {}
        for buffer in self._taken:
            self._free.setdefault(buffer.nbytes(), []).append(buffer)
        self._taken = []

    def clear(self) -> None:
        self.release()
        self._free = {}
        self._memory.forget()

    def _allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        return self._memory.allocate(num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """One file to write.

    Attributes:
        through_python: write through a Python file, whose name is not kept in the archive.
        pickled: what ``torch.save`` made of the value, without the content of its storages.
        storages: copies of these, by their number.
    """

    path: str
    through_python: bool
    pickled: bytes
    storages: tuple[torch.UntypedStorage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _DeviceCopies:
    """Copies that a device has been asked for; ``event`` comes after them."""

    event: Any
    device_idx: int

    @classmethod
    def mark(cls) -> _DeviceCopies:
        """Mark the end of everything that the current stream has been given so far."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if accelerator.device_name() != "cuda":
            accelerator.synchronize()
            return cls(None, 0)
        event = accelerator.Event()
        event.record()
        return cls(event, int(accelerator.current_device()))

    def wait(self) -> None:
        if self.event is None:
            return
        from deepspeed.accelerator import get_accelerator

        # The current device belongs to the thread, and the runtime would make a context on device 0.
        get_accelerator().set_device(self.device_idx)
        self.event.synchronize()


class StateCopies:
    """The values that a rank is about to write, as they are when they are handed in.

    A failure to copy or to write does not leave ``add``, because the caller may be between two barriers: ``write`` raises it.
    Without ``buffers`` every value is written as soon as it is handed in.
    """

    def __init__(self, buffers: HostBuffers | None) -> None:
        self._buffers = buffers
        self._held: list[_Held] = []
        self._own: set[int] = set()
        self._device_sources: list[torch.UntypedStorage] = []
        self._copied: _DeviceCopies | None = None
        self._error: Exception | None = None

    @property
    def is_immediate(self) -> bool:
        return self._buffers is None

    @property
    def has_failed(self) -> bool:
        """Whether ``write`` will raise a failure of copying."""
        return self._error is not None

    def add(self, value: Any, path: str, *, through_python: bool = False, trimmed: bool = False) -> None:
        """Copy ``value``, or write it at once if there is no memory for a copy.

        Args:
            value: what ``torch.save`` can write; its tensors are copied with the whole storage that they are views of.
            path: the file.
            through_python: whether to write through a Python file, which says why a write fails.
            trimmed: whether each tensor gets a storage of its own size, as DeepSpeed's ``clone_tensors_for_torch_save`` does.
        """
        if self._error is not None:
            return
        try:
            if self._buffers is None or not self._hold(self._buffers, value, path, through_python, trimmed):
                value = clone_tensors_for_torch_save(value) if trimmed else value
                _save(value, path, through_python, pickle)
        except Exception as error:  # noqa: BLE001  # raised by write(), once all ranks have passed their barriers
            self._error = error

    def _hold(self, buffers: HostBuffers, value: Any, path: str, through_python: bool, trimmed: bool) -> bool:
        if trimmed:
            if not buffers.has_room(tensor.numel() * tensor.element_size() for tensor in _tensors(value)):
                return False
            value = self._cloned(buffers, value)
        pickled, storages = _pickled_by_torch(value)
        foreign = [storage for storage in storages if storage._cdata not in self._own]
        if not buffers.has_room(storage.nbytes() for storage in foreign):
            return False
        copies = tuple(
            storage if storage._cdata in self._own else self._copy(buffers, storage) for storage in storages
        )
        self._held.append(_Held(path, through_python, pickled, copies))
        return True

    def _copy(self, buffers: HostBuffers, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = self._take(buffers, storage.nbytes())
        if storage.nbytes() == 0:
            return copy
        if storage.device.type == "cpu":
            copy.copy_(storage)
        else:
            self._device_sources.append(storage)
            copy.copy_(storage, non_blocking=True)
        return copy

    def _cloned(self, buffers: HostBuffers, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided or item.is_quantized:
                return clone_tensors_for_torch_save(item)
            storage = self._take(buffers, item.numel() * item.element_size())
            strides = torch.empty_like(item, device="meta").stride()
            copy = torch.empty(0, dtype=item.dtype).set_(storage, 0, item.shape, strides)
            if item.device.type != "cpu":
                self._device_sources.append(item.untyped_storage())
            return copy.copy_(item.detach(), non_blocking=True)
        if isinstance(item, list):
            return [self._cloned(buffers, value) for value in item]
        if isinstance(item, tuple):
            return tuple(self._cloned(buffers, value) for value in item)
        if isinstance(item, dict):
            return type(item)({key: self._cloned(buffers, value) for key, value in item.items()})
        return item

    def _take(self, buffers: HostBuffers, num_bytes: int) -> torch.UntypedStorage:
        buffer = buffers.take(num_bytes)
        self._own.add(buffer._cdata)
        return buffer

    def finish_copying(self) -> None:
        """Let training change the state again; its device work comes behind the copies.

        On CUDA nothing waits here: copies lie on the stream that training goes on with, before the next forward, and ``write``
        waits for them. They have no stream of their own, because a forward changes state, too, such as the statistics of
        normalisation layers. Elsewhere the device is synchronised.
        """
        if self._device_sources:
            self._copied = _DeviceCopies.mark()

    def _end_copying(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.wait()
        # Until here, or memory that a library frees on a stream of its own might be given away before it is copied.
        self._device_sources.clear()

    def write(self) -> None:
        """Write the copies in order, release the buffers, and raise the first failure.

        Any thread, one at a time.
        """
        held, self._held = self._held, []
        try:
            self._end_copying()
            if self._error is not None:
                raise self._error
            while held:
                one = held.pop(0)
                _save(one, one.path, one.through_python, _ReplayingModule)
        finally:
            held.clear()
            self._own.clear()
            if self._buffers is not None:
                self._buffers.release()


def _save(value: Any, path: str, through_python: bool, pickle_module: Any) -> None:
    if not through_python:
        torch.save(value, path, pickle_module=pickle_module)
        return
    with pathlib.Path(path).open("wb") as file:
        torch.save(value, file, pickle_module=pickle_module)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)


class _Pickled(Exception):  # noqa: N818  # not an error: ends torch.save once it has pickled
    def __init__(self, pickled: bytes, storages: tuple[torch.UntypedStorage, ...]) -> None:
        super().__init__()
        self.pickled = pickled
        self.storages = storages


def _pickled_by_torch(value: Any) -> tuple[bytes, tuple[torch.UntypedStorage, ...]]:
    """Return what ``torch.save`` pickles, and by number the storages it would write."""
    try:
        torch.save(value, io.BytesIO(), pickle_module=_CapturingModule)
    except _Pickled as done:
        return done.pickled, done.storages
    raise RuntimeError("torch.save has not pickled with the module that it was given")


class _TorchPickler:
    """Base of ``torch.save``'s pickler, whose ``persistent_id`` numbers storages."""

    persistent_id: Callable[[Any], Any]

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        self._file = file
        self._protocol = protocol


class _Capturing(_TorchPickler):
    """Pickles, and ends ``torch.save`` before it writes."""

    def dump(self, value: Any) -> None:
        recorder = _Recorder(self._file, self._protocol, self.persistent_id)
        recorder.dump(value)
        raise _Pickled(self._file.getvalue(), tuple(recorder.storages.values()))


class _Replaying(_TorchPickler):
    """Hands back what was pickled, and has the copies numbered as the storages were."""

    def dump(self, held: _Held) -> None:
        """Write the bytes; ``torch.save`` then writes the copies."""
        for storage in held.storages:
            self.persistent_id(storage)
        self._file.write(held.pickled)


class _CapturingModule:
    """A pickle module for ``torch.save``."""

    Pickler = _Capturing


class _ReplayingModule:
    """A pickle module for ``torch.save``."""

    Pickler = _Replaying


class _Recorder(pickle.Pickler):
    """Pickles as torch does, and keeps the storages that torch numbers."""

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
