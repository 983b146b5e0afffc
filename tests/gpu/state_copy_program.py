"""Run a check of background saves, named by the argument."""

import gc
import pathlib
import sys
import threading

import torch

from dstrial.engine.snapshot import HostBuffers, StateCopies

DEVICE = torch.device("cuda", 0)


def save_in_thread(copies):
    thread = threading.Thread(target=copies.write, name="writer")
    thread.start()
    thread.join()


def compute():
    """Launch a kernel and synchronise, so that a pending CUDA error is raised."""
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
    torch.cuda.synchronize()


def contexts():
    """Background saves create no additional CUDA context, whichever thread they use."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def num_contexts():
        # All contexts are counted: in a container, NVML reports other pids than os.getpid().
        return sum(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles)

    before = num_contexts()
    torch.cuda.set_device(DEVICE)
    state = torch.randn(4_000_000, device=DEVICE)
    compute()
    own = num_contexts() - before
    memory_before = torch.cuda.mem_get_info(DEVICE)[0]
    buffers = HostBuffers(device=DEVICE)
    for _ in range(2):
        copies = StateCopies(buffers)
        copies.add({"state": state}, "state.pt")
        save_in_thread(copies)
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join()
    gc.collect()
    compute()
    # In some containers NVML lists no processes; the memory check below works there, too.
    assert own in (0, 1), f"{own} contexts of one process before a save"
    assert num_contexts() - before == own, f"{num_contexts() - before} contexts after two saves"
    taken = memory_before - torch.cuda.mem_get_info(DEVICE)[0]
    assert taken < 64 << 20, f"saving took {taken >> 20} MiB of the device"


def registrations():
    """Large host buffers are pinned and released while kernels still work."""
    buffers = HostBuffers(device=DEVICE)
    chunks = [buffers.take([(1 << 20) + number, 200]) for number in range(20)]
    compute()
    storages = [storage for chunk in chunks for storage in chunk]
    pinned = [torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned() for storage in storages]
    assert all(pinned), f"{pinned.count(False)} of {len(pinned)} buffers are not pinned"
    source = torch.arange(200, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(0, dtype=torch.uint8).set_(storages[-1])
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source.cpu())
    del chunks, storages, target
    buffers.clear()
    gc.collect()
    compute()


def ordering():
    """A file holds the state at the time of ``add``, not later changes of the tensors."""
    pathlib.Path("at once").mkdir()
    pathlib.Path("later").mkdir()
    state = {"large": torch.randn(100_000_000, device=DEVICE), "small": torch.randn(17, device=DEVICE)}
    state["half"] = state["large"][:5_000_001].bfloat16()
    torch.save(state, "at once/state.pt")
    for pins in (True, False):
        buffers = HostBuffers(device=DEVICE if pins else None)
        kept = {name: value.clone() for name, value in state.items()}
        torch.cuda.synchronize()
        copies = StateCopies(buffers)
        copies.add(state, "later/state.pt")
        for value in state.values():
            value.zero_()
        save_in_thread(copies)
        assert not state["large"].any()
        assert pathlib.Path("later/state.pt").read_bytes() == pathlib.Path("at once/state.pt").read_bytes(), (
            pins
        )
        for name, value in kept.items():
            state[name].copy_(value)


{check.__name__: check for check in (contexts, registrations, ordering)}[sys.argv[1]]()
print("held")
