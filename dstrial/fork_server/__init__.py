"""Starts programs as forks of a process that has imported torch and DeepSpeed.

A server (``server``) imports and forks idle processes, *spares*. A spare that receives a program from its parent (``client``)
checks that a new process would import the same, takes on the program's state (``fork``) and runs it; otherwise it refuses, and
the parent starts a new process. This module decides which environments a server serves: its *key* are all variables but those
that are read after the fork.

Standard library only, apart from modules that the server is told to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dstrial.determined_imports import SITE

PATH_VARIABLE = "PYTHONPATH"
NVML_CHECK_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask NVML for devices, which leaves no state that a fork would not survive (``torch/cuda/__init__.py``)."""
FREE_PREFIXES = (
    "DET_",
    "DSTRIAL_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "CROSS_",
    "MASTER_",
    "TORCHELASTIC_",
    "ACCELERATE_",
)
"""Variables that identify a trial and a rank; no module that is imported ahead reads them."""

FREE_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        # where a process works
        "PWD",
        "OLDPWD",
        "TMPDIR",
        # of Determined's launchers, which read them when they meet; each allocation has ports of its own
        "C10D_PORT",
        "DTRAIN_SSH_PORT",
        "INTER_TRAIN_PROCESS_COMM_PORT_1",
        "INTER_TRAIN_PROCESS_COMM_PORT_2",
        # read when a device is first asked for, which no import does
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        NVML_CHECK_VARIABLE,
        # read when a process group is made (torch 2.13, ProcessGroupGloo.cpp and ProcessGroupNCCL.cpp); our launcher sets them
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        # read at the first compilation
        "TORCHINDUCTOR_CACHE_DIR",
        # a shell's own
        "SHLVL",
        "_",
        # of pytest, which sets it anew for each test and phase
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that are read after the fork only. All others, known or not, belong to the key."""


def is_free(name: str) -> bool:
    """Return whether forks of one process may differ in a variable."""
    return name in FREE_NAMES or name.startswith(FREE_PREFIXES)


def key_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all forks of a process share."""
    key = {name: value for name, value in environment.items() if not is_free(name)}
    places = [place for place in import_places(environment) if place != SITE]
    if places:
        return {**key, PATH_VARIABLE: os.pathsep.join(places)}
    key.pop(PATH_VARIABLE, None)
    return key


def import_places(environment: Mapping[str, str]) -> list[str]:
    """Return the directories that PYTHONPATH names."""
    return [place for place in environment.get(PATH_VARIABLE, "").split(os.pathsep) if place]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of key variables in which two environments differ, sorted.

    Names only: values may be secrets.
    """
    ours, theirs = key_of(one), key_of(other)
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
