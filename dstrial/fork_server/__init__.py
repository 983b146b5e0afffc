"""Start programs as forks of a server that has imported torch and DeepSpeed.

The server (``server``) imports the modules and forks idle processes, called *spares*. The server's parent (``client``) sends a
Python program to a spare. The spare (``fork``) adopts the program's environment, directory and open files, and runs the
program. If a new process would import other module files than the server did, the spare refuses, and the client starts a new
process. A server runs only programs with the same *key* as the server: all environment variables except those that are read
only after the fork. The package itself uses only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dstrial.determined_imports import SITE

PATH_VARIABLE = "PYTHONPATH"
NVML_CHECK_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: 1 makes torch count devices by NVML, so that the process can still fork (``torch/cuda/__init__.py``)."""
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
"""Prefixes of variables that may differ between the forks of one server.

These variables identify a trial or rank. No module that a fork server imports reads them.
"""

FREE_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        # working and temporary directories
        "PWD",
        "OLDPWD",
        "TMPDIR",
        # ports of Determined's launchers, different for each allocation; read at rendezvous
        "C10D_PORT",
        "DTRAIN_SSH_PORT",
        "INTER_TRAIN_PROCESS_COMM_PORT_1",
        "INTER_TRAIN_PROCESS_COMM_PORT_2",
        # read at the first use of a device; no import uses one
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        NVML_CHECK_VARIABLE,
        # set by dstrial's launcher; read by process groups (torch 2.13, ProcessGroupGloo.cpp and ProcessGroupNCCL.cpp)
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        # read at the first compilation
        "TORCHINDUCTOR_CACHE_DIR",
        # set by shells
        "SHLVL",
        "_",
        # set by pytest for each test and phase
        "PYTEST_CURRENT_TEST",
    }
)
"""Names of variables that may differ between the forks of one server, because they are read only after the fork."""


def is_free(name: str) -> bool:
    """Return whether an environment variable may differ between forks of one server."""
    return name in FREE_NAMES or name.startswith(FREE_PREFIXES)


def key_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a fork server and its programs must share."""
    key = {name: value for name, value in environment.items() if not is_free(name)}
    places = [place for place in pythonpath_of(environment) if place != SITE]
    if places:
        return {**key, PATH_VARIABLE: os.pathsep.join(places)}
    key.pop(PATH_VARIABLE, None)
    return key


def pythonpath_of(environment: Mapping[str, str]) -> list[str]:
    """Return the directories listed in ``PYTHONPATH`` of an environment, in order."""
    return [place for place in environment.get(PATH_VARIABLE, "").split(os.pathsep) if place]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the sorted names of variables with which two environments differ.

    Variables that may differ between the forks of one server (``is_free``) are ignored. The values are not returned, because
    they may be secrets.
    """
    ours, theirs = key_of(one), key_of(other)
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
