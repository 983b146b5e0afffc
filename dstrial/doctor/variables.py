"""Environment variables that change what trainings do, as far as they are set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dstrial.doctor.finding import Finding, note, ok, problem

_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
"""Source: DeepSpeed 0.19.8 ``accelerator/real_accelerator.py``, SUPPORTED_ACCELERATOR_LIST."""

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other",
    "NCCL_P2P_DISABLE": "devices do not copy to each other directly",
    "NCCL_SHM_DISABLE": "ranks of a machine do not talk through memory",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "DSTRIAL_SHARE_DEVICE": "several ranks share a device, over gloo",
    "TORCH_SHOW_CPP_STACKTRACES": "",
}
_SHOWN = re.compile(
    r"(CUDA_|HIP_|ROCR_|NCCL_|RCCL_|TORCH_|PYTORCH_|GLOO_|DS_|DSTRIAL_|OMP_|MKL_|KMP_|SLURM_JOB_ID$|SLURM_NTASKS$|DET_MASTER$"
    r"|TORCHELASTIC_|PYTHONPATH$|PYTHONHOME$|PYTHONOPTIMIZE$|LD_PRELOAD$|LD_LIBRARY_PATH$|CXX$|CC$|MAX_JOBS$|TMPDIR$|HF_HOME$|XDG_CACHE_HOME$)"
)
_LONGEST = 200


def judge(environ: Mapping[str, str]) -> list[Finding]:
    """Judge environment variables; values that may hold what is secret are not shown."""
    found = [
        *_judge_accelerator(environ),
        *_judge_ranks(environ),
        *_judge_slow(environ),
        *_judge_paths(environ),
        *_judge_proxies(environ),
    ]
    told = {finding.name for finding in found}
    rest = sorted(
        name
        for name in environ
        if _SHOWN.match(name) and name not in told and name not in _RANK and environ[name]
    )
    found += [ok(name, shown(environ[name])) for name in rest]
    return found or [ok("variables", "none is set that changes what trainings do")]


def shown(value: str) -> str:
    """Return a value to show: no user names or passwords in URLs, and not too long."""
    value = re.sub(r"://[^/@\s]+@", "://…@", value)
    return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"


def _judge_accelerator(environ: Mapping[str, str]) -> list[Finding]:
    chosen = environ.get("DS_ACCELERATOR")
    if chosen is None:
        return []
    if chosen not in _ACCELERATORS:
        return [
            problem(
                "DS_ACCELERATOR",
                f"{chosen!r}, which DeepSpeed does not know",
                f"Set it to one of {', '.join(_ACCELERATORS)}, or unset it.",
            )
        ]
    return [ok("DS_ACCELERATOR", f"{chosen}: DeepSpeed looks for no other device")]


def _judge_ranks(environ: Mapping[str, str]) -> list[Finding]:
    there = [name for name in _RANK if name in environ]
    if "RANK" not in there and "LOCAL_RANK" not in there and "WORLD_SIZE" not in there:
        return [ok(name, environ[name]) for name in there]
    return [
        note(
            ", ".join(there),
            "set, as for a rank of a launcher: `python script.py` from this shell waits for other ranks",
            f"`unset {' '.join(there)}`, unless a launcher set them.",
        )
    ]


def _judge_slow(environ: Mapping[str, str]) -> list[Finding]:
    return [
        note(
            name,
            f"{environ[name]}: {why or 'for looking for errors'}, which makes training slower",
            f"`unset {name}`.",
        )
        for name, why in _SLOW.items()
        if environ.get(name) not in (None, "", "0", "OFF", "INFO")
    ]


def _judge_paths(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    temporary = environ.get("TMPDIR")
    # With a dot behind it, only a directory is there; unlike `Path.is_dir`, no name makes this raise.
    if temporary and not os.access(f"{temporary}/.", os.W_OK | os.X_OK):
        found.append(
            problem(
                "TMPDIR", f"{temporary} is no directory that can be written to", "Make it, or `unset TMPDIR`."
            )
        )
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        missing = [
            word for word in environ.get(name, "").split(os.pathsep) if word and not os.access(word, os.F_OK)
        ]
        if missing:
            found.append(
                note(name, f"names {', '.join(missing)}, which is not there", f"Take it out of {name}.")
            )
    home = environ.get("CUDA_HOME")
    if home and not os.access(f"{home}/.", os.X_OK):
        found.append(
            note("CUDA_HOME", f"{home} is no directory", "Set it to the toolkit's directory, or unset it.")
        )
    if environ.get("PYTHONOPTIMIZE"):
        found.append(
            note(
                "PYTHONOPTIMIZE",
                "set: DeepSpeed and torch check nothing by `assert`",
                "`unset PYTHONOPTIMIZE`: many of DeepSpeed's messages about configs are asserts.",
            )
        )
    return found


def _judge_proxies(environ: Mapping[str, str]) -> list[Finding]:
    proxy = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)), None
    )
    if proxy is None:
        return []
    exempt = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    names = {word.strip().lstrip(".") for word in exempt}
    if "*" in names or {"localhost", "127.0.0.1"} <= names:
        return [ok(proxy, shown(environ[proxy]))]
    return [
        problem(
            proxy,
            f"{shown(environ[proxy])} is asked for the master at localhost too: `det` and trials do not reach it",
            "Set `no_proxy=localhost,127.0.0.1`.",
        )
    ]
