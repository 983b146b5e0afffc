"""What saving in the background does with host memory and the device: one check, named by the argument."""

import gc
import pathlib
import sys
import threading

import torch

from dstrial.engine.async_copy.pinned_memory import CudaRuntime, host_memory_for
from dstrial.engine.async_copy.state_copy import HostBuffers, StateCopies

DEVICE = torch.device("cuda", 0)


def save_in_thread(copies):
    thread = threading.Thread(target=copies.write, name="writer")
    thread.start()
    thread.join()


def compute():
    """Launch a kernel and wait for it, so that an error that lies about is found."""
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
    torch.cuda.synchronize()


def contexts():
    """A save makes no further context on any device, in whichever thread it registers, waits and releases."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def num_contexts():
        # Not compared with this process's id, which is another one in the device's view of a container.
        return sum(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles)

    before = num_contexts()
    torch.cuda.set_device(DEVICE)
    state = torch.randn(4_000_000, device=DEVICE)
    compute()
    own = num_contexts() - before
    memory_before = torch.cuda.mem_get_info(DEVICE)[0]
    buffers = HostBuffers(memory=host_memory_for(DEVICE))
    buffers.prepare([state.untyped_storage().nbytes()])
    for _ in range(2):
        copies = StateCopies(buffers)
        copies.add({"state": state}, "state.pt")
        copies.finish_copying()
        save_in_thread(copies)
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join()
    gc.collect()
    compute()
    # NVML tells of no processes in some containers; the memory below tells all the same.
    assert own in (0, 1), f"{own} contexts of one process before a save"
    assert num_contexts() - before == own, f"{num_contexts() - before} contexts after two saves"
    taken = memory_before - torch.cuda.mem_get_info(DEVICE)[0]
    assert taken < 64 << 20, f"saving took {taken >> 20} MiB of the device"


def registrations():
    """1,000 small buffers and some large ones are registered and released, and kernels go on."""
    memory = host_memory_for(DEVICE)
    sizes = [1 + 37 * (number % 500) for number in range(1000)] + [(1 << 20) + number for number in range(20)]
    storages = [memory.allocate(size) for size in sizes]
    compute()
    pinned = [torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned() for storage in storages]
    assert all(pinned), f"{pinned.count(False)} of {len(pinned)} buffers are not pinned"
    source = torch.arange(200, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(0, dtype=torch.uint8).set_(storages[999])[:200]
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source.cpu())
    del storages, target, memory
    gc.collect()
    compute()


def refusal():
    """A page that is registered twice is refused, and no later kernel is blamed for it."""
    import numpy as np

    page = 1 << 12
    whole = np.empty(64 * page, dtype=np.uint8)
    address = whole.ctypes.data + (-whole.ctypes.data % page)
    runtime = CudaRuntime(DEVICE)
    compute()
    with runtime.on_device():
        assert runtime.register(address, 8 * page) == 0
        error = runtime.register(address, 8 * page)
        assert error == 712, f"the second registration returned {error}"
        runtime.clear_error()
    compute()
    with runtime.on_device():
        runtime.unregister(address)
        assert runtime.register(address, 8 * page) == 0, "the first registration was not released"
        runtime.unregister(address)
    compute()


def ordering():
    """A file holds the state of when it was asked for, bit by bit, though the device changes it at once."""
    pathlib.Path("at once").mkdir()
    pathlib.Path("later").mkdir()
    state = {"large": torch.randn(100_000_000, device=DEVICE), "small": torch.randn(17, device=DEVICE)}
    state["half"] = state["large"][:5_000_001].bfloat16()
    torch.save(state, "at once/state.pt")
    for pins in (True, False):
        buffers = HostBuffers(memory=host_memory_for(DEVICE) if pins else None)
        kept = {name: value.clone() for name, value in state.items()}
        torch.cuda.synchronize()
        copies = StateCopies(buffers)
        copies.add(state, "later/state.pt")
        copies.finish_copying()
        for value in state.values():
            value.zero_()
        save_in_thread(copies)
        assert not state["large"].any()
        assert pathlib.Path("later/state.pt").read_bytes() == pathlib.Path("at once/state.pt").read_bytes(), (
            pins
        )
        for name, value in kept.items():
            state[name].copy_(value)


{check.__name__: check for check in (contexts, registrations, refusal, ordering)}[sys.argv[1]]()
print("held")
