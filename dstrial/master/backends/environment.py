"""Environment, ports and cluster-info files of tasks, as Determined sets them.

Source: Determined 0.38.1, ``determined._info``, ``determined.exec`` and ``determined.launch``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dstrial import determined_imports
from dstrial.errors import MasterError
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE, BASE_PYTHON_VARIABLE
from dstrial.master.backends.backend import TRIAL, AllocationRequest
from dstrial.ranks.identity import SHARE_VARIABLE
from dstrial.scratch import compile_cache
from dstrial.storage_guard import STORAGE_VARIABLE

# As in dstrial.launch.failures, which the master never imports.
TRACEBACKS_DIR_VARIABLE = "DSTRIAL_TRACEBACKS_DIR"
MARKER_VARIABLE = "DSTRIAL_ALLOCATION_MARKER"
"""Environment variable with a value that only the processes of one allocation have."""

# Linux limits a variable to 128 KiB. Larger values are passed in the cluster-info files only.
_MAX_VALUE_BYTES = 100_000
# Retries of a trial's reports: about every second, for as long as the master is unreachable.
_RETRIES = {
    "total": 1_000_000,
    "backoff_factor": 0.25,
    "backoff_max": 1.0,
    "allowed_methods": None,
    "status_forcelist": [502, 503, 504],
}
_OWN_FILES = Path(__file__).parent
# First port of each range, Determined's own numbers.
_FIRST_PORTS = {
    "C10D_PORT": 29400,
    "DTRAIN_SSH_PORT": 12350,
    "INTER_TRAIN_PROCESS_COMM_PORT_1": 12360,
    "INTER_TRAIN_PROCESS_COMM_PORT_2": 12365,
    "DSTRIAL_DEEPSPEED_PORT": 29500,
}
_NUM_PORTS = 2000  # size of each range
TENSORBOARD_PORTS = {"TENSORBOARD_PORT": 2600}
# Variables removed from tasks on AMD devices: each would filter the devices of HIP_VISIBLE_DEVICES again.
_ROCM_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def trial_config(request: AllocationRequest) -> dict[str, Any]:
    """Return a trial's config as the trial's processes read it.

    Checkpoint storage of type ``shared_fs`` is replaced by the equivalent storage of type ``directory``.
    """
    config = copy.deepcopy(request.config)
    storage = config.get("checkpoint_storage") or {}
    if storage.get("type") == "shared_fs":
        host_path = PurePosixPath(storage["host_path"])
        path = host_path / storage["storage_path"] if storage.get("storage_path") else host_path
        kept = {key: value for key, value in storage.items() if key.startswith("save_")}
        config["checkpoint_storage"] = {"type": "directory", "container_path": str(path), **kept}
    return config


def cluster_info_files(request: AllocationRequest) -> dict[str, dict[str, Any]]:
    """Return name -> content of the files that ``determined.get_cluster_info`` reads."""
    files: dict[str, dict[str, Any]] = {
        "cluster.json": {
            "master_url": request.master_url,
            "cluster_id": request.cluster_id,
            "agent_id": request.agent_id,
            "slot_ids": [slot.id for slot in request.slots],
            "task_id": request.task_id,
            "allocation_id": request.allocation_id,
            "session_token": request.session_token,
            "task_type": request.task_type,
            "master_cert_name": None,
            "master_cert_file": None,
            "latest_checkpoint": request.latest_checkpoint,
        },
        "trial.json": {
            "trial_id": request.trial_id,
            "experiment_id": request.experiment_id,
            "trial_seed": request.trial_seed,
            "hparams": request.hparams,
            "config": trial_config(request),
            "steps_completed": request.steps_completed,
            "trial_run_id": request.run_id,
            "debug": bool(request.config.get("debug")),
            "inter_node_network_interface": None,
        },
        "resources.json": {"gpu_uuids": [slot.uuid for slot in request.slots if slot.kind != "cpu"]},
        "rendezvous.json": {
            "container_addrs": list(request.addresses),
            "container_rank": request.node_rank,
            "container_slot_counts": list(request.slot_counts) or [len(request.slots)],
        },
    }
    if request.task_type != TRIAL:
        del files["trial.json"]
    return files


def trial_environment(
    request: AllocationRequest,
    *,
    marker: str,
    temporary_directory: Path,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a trial's or command's entrypoint.

    The result extends ``base``, by default the master's environment. ``marker`` is a unique value that identifies the task's
    processes if their supervisor has died. ``temporary_directory`` becomes ``TMPDIR``.
    """
    outer = os.environ if base is None else base
    env = {name: value for name, value in outer.items() if not name.startswith(("DET_", "DSTRIAL_"))}
    # TMPDIR is deleted with the allocation, so torch's compile cache is put elsewhere.
    env.update(compile_cache())
    env.update(user_variables(request.config, request.slots[0].kind if request.slots else "cpu"))
    bin_dirs = [str(_OWN_FILES / "bin"), str(Path(request.interpreter or sys.executable).parent)]
    env["PATH"] = os.pathsep.join([*bin_dirs, env.get("PATH", os.defpath)])
    # Also puts the directory of dstrial's sitecustomize first in PYTHONPATH.
    env.update(determined_imports.variables(env, request.config))
    env["PYTHONUNBUFFERED"] = env.get("PYTHONUNBUFFERED", "1")
    env["TMPDIR"] = str(temporary_directory)
    env.update(_protocol_variables(request))
    env.update({name: str(port) for name, port in request.ports.items()})
    if any(slot.kind == "rocm" for slot in request.slots):
        env = {name: value for name, value in env.items() if name not in _ROCM_VISIBILITY}
    env.update(_device_variables(request, env))
    env[ALLOCATION_DIR_VARIABLE] = str(request.directory)
    env[MARKER_VARIABLE] = marker
    if request.task_type == TRIAL:
        directory = tracebacks_directory(request.directory, request.trial_id) / f"run_{request.run_id}"
        env[TRACEBACKS_DIR_VARIABLE] = str(directory)
    if request.storage is not None:
        env[STORAGE_VARIABLE] = request.storage
    env[BASE_PYTHON_VARIABLE] = request.interpreter or sys.executable
    return {**request.variables, **env}


def tracebacks_directory(allocation_directory: Path, trial_id: int) -> Path:
    """Return the directory of a trial's tracebacks, which outlives the allocation."""
    return allocation_directory.parent.parent / "tracebacks" / f"trial_{trial_id}"


def _protocol_variables(request: AllocationRequest) -> dict[str, str]:
    host, _, port = request.master_url.rpartition("://")[2].partition(":")
    values = {
        "DET_MASTER": request.master_url,
        "DET_MASTER_HOST": host,
        "DET_MASTER_ADDR": host,
        "DET_MASTER_PORT": port or "80",
        "DET_MASTER_ID": request.master_id,
        "DET_CLUSTER_ID": request.cluster_id,
        "DET_USE_TLS": "false",
        "DET_SEGMENT_ENABLED": "false",
        "DET_SEGMENT_API_KEY": "",
        "DET_AGENT_ID": request.agent_id,
        "DET_SLOT_IDS": json.dumps([slot.id for slot in request.slots]),
        "DET_TASK_ID": request.task_id,
        "DET_ALLOCATION_ID": request.allocation_id,
        "DET_SESSION_TOKEN": request.session_token,
        "DET_USER": request.username,
        "DET_USER_TOKEN": request.user_token,
        "DET_TASK_TYPE": request.task_type,
        "DET_RESOURCES_ID": request.resources_id,
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_CONTAINER_ID": request.resources_id,
        "DET_TASK_LOGGING_METADATA": json.dumps(
            {"allocation_id": request.allocation_id, "task_id": request.task_id}
        ),
        "DET_PYTHON_EXECUTABLE": request.interpreter or sys.executable,
        "DET_RUN_DIR": str(request.directory),
        "DET_WORKDIR": str(request.directory / "workdir"),
        "DET_RETRY_CONFIG": json.dumps(_RETRIES),
        **(_trial_variables(request) if request.task_type == TRIAL else {}),
    }
    return {name: value for name, value in values.items() if len(value.encode()) <= _MAX_VALUE_BYTES}


def _trial_variables(request: AllocationRequest) -> dict[str, str]:
    values = {
        "DET_TRIAL_ID": str(request.trial_id),
        "DET_EXPERIMENT_ID": str(request.experiment_id),
        "DET_TRIAL_SEED": str(request.trial_seed),
        "DET_TRIAL_RUN_ID": str(request.run_id),
        "DET_STEPS_COMPLETED": str(request.steps_completed),
        "DET_HPARAMS": json.dumps(request.hparams),
        "DET_EXPERIMENT_CONFIG": json.dumps(trial_config(request)),
    }
    if request.latest_checkpoint is not None:
        values["DET_LATEST_CHECKPOINT"] = request.latest_checkpoint
    return values


def _device_variables(request: AllocationRequest, env: Mapping[str, str]) -> dict[str, str]:
    kinds = {slot.kind for slot in request.slots}
    # Each device is listed once: CUDA ignores all devices after a repeated one.
    names = dict.fromkeys(slot.uuid for slot in request.slots)
    if "cuda" in kinds:
        shared = {SHARE_VARIABLE: "1"} if len(names) < len(request.slots) else {}
        # DeepSpeed parses them as integers (0.19.8 cuda_accelerator.py:188), with NVML's numbers: in PCI bus order, which CUDA
        # uses only if CUDA_DEVICE_ORDER says so.
        visible = ",".join(dict.fromkeys(slot.visible_as for slot in request.slots))
        return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **shared}
    if "rocm" in kinds:
        # ROCR_VISIBLE_DEVICES stays unset: HIP's indices would refer to its devices.
        return {"HIP_VISIBLE_DEVICES": ",".join(names)}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": env.get("DS_ACCELERATOR", "cpu"),
        # A CPU slot is one core. Concurrent trials that each use all cores would slow each other down.
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
        # Determined's launcher for DeepSpeed reads the number of ranks here if there are no devices to count.
        "LOCAL_SIZE": str(max(len(request.slots), 1)),
    }


def user_variables(config: Mapping[str, Any], kind: str = "cpu") -> dict[str, str]:
    """Return name -> value of the variables in a config's ``environment_variables``.

    The config may have one list of variables, or a list for each kind of device. ``kind`` (cpu, cuda, rocm) selects the list.
    """
    given = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(given, Mapping):
        given = given.get(kind) or []
    values: dict[str, str] = {}
    for assignment in given:
        name, _, value = str(assignment).partition("=")
        values[name] = value
    return values


def choose_ports(used: Collection[int], first_ports: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return a free port for each environment variable that names a port.

    The search in a variable's range starts at a random port. Trials bind their ports later, so two masters on one machine
    could otherwise choose the same port.

    Args:
        used: ports of other allocations, which are skipped.
        first_ports: environment variable -> first port of the variable's range; by default, the variables of a trial.
    """
    taken = set(used)
    ports: dict[str, int] = {}
    for variable, first in (_FIRST_PORTS if first_ports is None else first_ports).items():
        start = random.Random().randrange(_NUM_PORTS)  # a new generator, which ignores the process's seed
        candidates = (first + (start + offset) % _NUM_PORTS for offset in range(_NUM_PORTS))
        port = next((p for p in candidates if p not in taken and _is_free(p)), None)
        if port is None:
            raise MasterError(
                f"every port from {first} to {first + _NUM_PORTS - 1} is in use; expected a free one for {variable}. "
                "End the programs that listen there."
            )
        ports[variable] = port
        taken.add(port)
    return ports


def _is_free(port: int) -> bool:
    with contextlib.ExitStack() as stack:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - a probe
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


_TRIAL_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def command_for(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the command line that runs an experiment's entrypoint.

    A list is run as it is. A string ``module:Class`` is run by ``python3 -m dstrial.launch --trial``; a subclass of
    Determined's ``PyTorchTrial`` then runs in Determined's harness. Any other string is run by ``sh -c``.
    """
    if not isinstance(entrypoint, str):
        return list(entrypoint)
    if _TRIAL_FORM.fullmatch(entrypoint.strip()):
        return ["python3", "-m", "dstrial.launch", "--trial", entrypoint.strip()]
    return ["sh", "-c", entrypoint]
