"""Which pages are locked, for which device and in which thread; a stand-in for the CUDA runtime records it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import mmap
import pathlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dstrial.engine.async_copy.pinned_memory import PinnedMemory
from dstrial.engine.async_copy.state_copy import HostBuffers, StateCopies

_ALREADY_REGISTERED = 712


@dataclasses.dataclass
class Recorded:
    """A runtime of device 1 that says what is asked of it; a page can be registered once, as with CUDA's."""

    refuses_after: int | None = None
    calls: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    pages: dict[int, range] = dataclasses.field(default_factory=dict)
    devices: dict[int, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        thread = threading.get_ident()
        before = self.devices.get(thread, 0)
        self.devices[thread] = 1
        yield
        self.devices[thread] = before

    def register(self, address: int, num_bytes: int) -> int:
        self._record("register")
        if self.refuses_after is not None and len(self.pages) >= self.refuses_after:
            return 2
        touched = range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE))
        if any(pages.start < touched.stop and touched.start < pages.stop for pages in self.pages.values()):
            return _ALREADY_REGISTERED
        self.pages[address] = touched
        return 0

    def unregister(self, address: int) -> None:
        self._record("unregister")
        del self.pages[address]

    def clear_error(self) -> None:
        self._record("clear")

    def _record(self, what: str) -> None:
        thread = threading.current_thread()
        self.calls.append((what, thread.name, self.devices.get(thread.ident or 0, 0)))

    @property
    def locked_bytes(self) -> int:
        return mmap.PAGESIZE * sum(map(len, self.pages.values()))

    def is_locked(self, storage: torch.UntypedStorage) -> bool:
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes() - 1
        touched = range(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)
        return all(any(page in pages for pages in self.pages.values()) for page in touched)


def test_pages_are_locked_on_the_ranks_own_device_in_whichever_thread() -> None:
    """A thread's current device is 0 at first; a registration there would make a second context on it."""
    runtime = Recorded()
    buffers = HostBuffers(memory=PinnedMemory(runtime))
    buffers.prepare([5_000_000, 300])
    assert buffers.num_bytes == 5_000_300
    buffers.take(7_000_000)
    buffers.clear()
    thread = threading.Thread(target=lambda: (buffers.clear(), gc.collect()), name="writer")
    thread.start()
    thread.join()
    assert {device for _, _, device in runtime.calls} == {1}
    assert {name for what, name, _ in runtime.calls if what == "register"} == {
        "dstrial-save-buffers",
        "MainThread",
    }
    assert runtime.pages == {}


def test_a_thousand_small_buffers_take_a_handful_of_registrations_and_share_no_page() -> None:
    runtime = Recorded()
    memory = PinnedMemory(runtime)
    sizes = [1 + 37 * (number % 500) for number in range(1000)]
    storages = [memory.allocate(size) for size in sizes]
    assert [storage.nbytes() for storage in storages] == sizes
    assert all(storage.data_ptr() % 64 == 0 for storage in storages)
    assert all(runtime.is_locked(storage) for storage in storages)
    ends = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    assert len(runtime.calls) <= 4
    del storages, memory
    gc.collect()
    assert runtime.pages == {}


def test_large_buffers_of_any_size_share_no_page_with_each_other() -> None:
    runtime = Recorded()
    memory = PinnedMemory(runtime)
    storages = [memory.allocate(size) for size in [1 << 20, (1 << 20) + 1, 1_500_000] * 20]
    assert [name for name, _, _ in runtime.calls] == ["register"] * 60
    assert all(runtime.is_locked(storage) for storage in storages)
    assert len(runtime.pages) == 60


def test_a_refusal_is_cleared_said_once_and_saves_go_on_in_ordinary_memory(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps a thread's last error until somebody asks; the next kernel's launch would be blamed for it."""
    runtime = Recorded(refuses_after=1)
    buffers = HostBuffers(memory=PinnedMemory(runtime))
    copies = StateCopies(buffers)
    value = {"a": torch.arange(300_000), "b": torch.arange(400_000), "c": torch.arange(500_000)}
    copies.add(value, str(tmp_path / "state.pt"))
    copies.write()
    assert [what for what, _, _ in runtime.calls] == ["register", "register", "clear"]
    assert caplog.text.count("CUDA has refused to lock 3 MiB of host memory (error 2)") == 1
    loaded = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(loaded[name], value[name]) for name in value)


class OnDevice(torch.Tensor):
    """Says that it lies on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.fixture
def calls() -> Iterator[list[tuple[str, str]]]:
    """What is asked of an accelerator, and in which thread."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    asked: list[tuple[str, str]] = []

    def record(what: str) -> None:
        asked.append((what, threading.current_thread().name))

    class Event:
        def record(self) -> None:
            record("record")

        def synchronize(self) -> None:
            record("wait for the event")

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # deepspeed ships no types
        Event = property(lambda self: Event)

        def device_name(self, device_index: int | None = None) -> str:
            return "cuda"

        def current_device(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            record(f"device {device_index}")

        def synchronize(self, device_index: int | None = None) -> None:
            record("synchronize")

    before: Any = real_accelerator.get_accelerator()
    real_accelerator.set_accelerator(Accelerator())
    yield asked
    real_accelerator.set_accelerator(before)


@pytest.mark.parametrize("fails", [False, True])
def test_the_writer_waits_for_the_copies_and_training_does_not(
    tmp_path: pathlib.Path, calls: list[tuple[str, str]], fails: bool
) -> None:
    copies = StateCopies(HostBuffers())
    copies.add({"weight": torch.ones(9).as_subclass(OnDevice)}, str(tmp_path / "state.pt"), trimmed=True)
    if fails:
        copies.add(lambda: None, str(tmp_path / "other.pt"))
    copies.finish_copying()
    assert calls == [("record", "MainThread")]
    errors: list[BaseException] = []

    def write() -> None:
        try:
            copies.write()
        except (AttributeError, pickle.PicklingError) as error:
            errors.append(error)

    thread = threading.Thread(target=write, name="dstrial-save")
    thread.start()
    thread.join()
    # Even where an earlier failure is raised: the buffers are given away next.
    assert calls[1:] == [("device 1", "dstrial-save"), ("wait for the event", "dstrial-save")]
    assert bool(errors) == fails
    if not fails:
        weight = torch.load(tmp_path / "state.pt", weights_only=False)["weight"]
        assert torch.equal(weight.as_subclass(torch.Tensor), torch.ones(9))


def test_nothing_is_waited_for_where_no_copy_came_from_a_device(
    tmp_path: pathlib.Path, calls: list[tuple[str, str]]
) -> None:
    copies = StateCopies(HostBuffers())
    copies.add({"weight": torch.ones(9)}, str(tmp_path / "state.pt"))
    copies.finish_copying()
    copies.write()
    assert calls == []
