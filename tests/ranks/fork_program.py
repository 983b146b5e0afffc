"""Detect a simulated NVIDIA device, fork, print whether the fork could use CUDA.

Patches make torch look like a CUDA build: NVML reports one device, and queries of the driver are recorded, because they make
CUDA unusable in forks (torch/csrc/cuda/Module.cpp, ``THCPModule_getDeviceCount_wrap``: ``poison_fork``).
"""

import os

os.environ.pop("DS_ACCELERATOR", None)
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)

import torch

asked_driver = []
torch._C._cuda_getDeviceCount = lambda: asked_driver.append("asked") or 1
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: 1
torch.backends.cuda.is_built = lambda: True


def look_and_fork() -> str:
    from dstrial.ranks.process_group import has_accelerator, num_torch_accelerators

    assert has_accelerator()
    assert num_torch_accelerators() == 1
    child = os.fork()
    if child == 0:
        os._exit(1 if asked_driver else 0)
    _, status = os.waitpid(child, 0)
    return "poisoned" if os.waitstatus_to_exitcode(status) else "usable"


print(look_and_fork())
