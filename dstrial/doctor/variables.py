"""Report environment variables that change how training runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dstrial.doctor.finding import Finding, note, ok, problem

# Source: DeepSpeed 0.19.8 ``accelerator/real_accelerator.py``, SUPPORTED_ACCELERATOR_LIST.
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other",
    "NCCL_P2P_DISABLE": "devices do not copy to each other directly",
    "NCCL_SHM_DISABLE": "ranks of a machine do not talk through memory",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "DSTRIAL_SHARE_DEVICE": "several ranks share a device, over gloo",
}
_SHOWN = re.compile(
    r"(CUDA_|HIP_|ROCR_|NCCL_|RCCL_|TORCH_|PYTORCH_|GLOO_|DS_|DSTRIAL_|OMP_|MKL_|KMP_|SLURM_JOB_ID$|SLURM_NTASKS$|DET_MASTER$"
    r"|TORCHELASTIC_|PYTHONPATH$|PYTHONHOME$|PYTHONOPTIMIZE$|LD_PRELOAD$|LD_LIBRARY_PATH$|CXX$|CC$|MAX_JOBS$|TMPDIR$|HF_HOME$|XDG_CACHE_HOME$)"
)
_LONGEST = 200


def judge(environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on variables; values that may contain secrets are not shown."""
    found = [
        *_judge_accelerator(environ),
        *_judge_ranks(environ),
        *_judge_slow(environ),
        *_judge_paths(environ),
        *_judge_proxies(environ),
    ]
    reported = {finding.name for finding in found}
    found += [
        ok(name, shown(environ[name]))
        for name in sorted(environ)
        if _SHOWN.match(name) and name not in reported and name not in _RANK and environ[name]
    ]
    return found or [ok("variables", "no variable that changes training is set")]


def shown(value: str) -> str:
    """Return a value for display: shortened, without credentials in URLs."""
    value = re.sub(r"://[^/@\s]+@", "://…@", value)
    return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"


def _judge_accelerator(environ: Mapping[str, str]) -> list[Finding]:
    name, chosen = "DS_ACCELERATOR", environ.get("DS_ACCELERATOR")
    if chosen is None:
        return []
    if chosen not in _ACCELERATORS:
        todo = f"Set it to one of {', '.join(_ACCELERATORS)}, or unset it."
        return [problem(name, f"{chosen!r}, which DeepSpeed does not know", todo)]
    return [ok(name, f"{chosen}: DeepSpeed looks for no other device")]


def _judge_ranks(environ: Mapping[str, str]) -> list[Finding]:
    there = [name for name in _RANK if name in environ]
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(there):
        return [ok(name, environ[name]) for name in there]
    what = "set, as for a rank of a launcher: `python script.py` from this shell waits for other ranks"
    return [note(", ".join(there), what, f"`unset {' '.join(there)}`, unless a launcher set them.")]


def _judge_slow(environ: Mapping[str, str]) -> list[Finding]:
    return [
        note(name, f"{environ[name]}: {why}, which makes training slower", f"`unset {name}`.")
        for name, why in _SLOW.items()
        if environ.get(name) not in (None, "", "0", "OFF", "INFO")
    ]


def _judge_paths(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    temporary = environ.get("TMPDIR")
    # With "/." appended, only a directory exists; unlike `Path.is_dir`, this raises for no name.
    if temporary and not os.access(f"{temporary}/.", os.W_OK | os.X_OK):
        what = f"{temporary} is no directory that can be written to"
        found.append(problem("TMPDIR", what, "Make it, or `unset TMPDIR`."))
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        words = environ.get(name, "").split(os.pathsep)
        missing = [word for word in words if word and not os.access(word, os.F_OK)]
        if missing:
            what = f"names {', '.join(missing)}, which is not there"
            found.append(note(name, what, f"Take it out of {name}."))
    home = environ.get("CUDA_HOME")
    if home and not os.access(f"{home}/.", os.X_OK):
        todo = "Set it to the toolkit's directory, or unset it."
        found.append(note("CUDA_HOME", f"{home} is no directory", todo))
    if environ.get("PYTHONOPTIMIZE"):
        todo = "`unset PYTHONOPTIMIZE`: many of DeepSpeed's messages about configs are asserts."
        found.append(note("PYTHONOPTIMIZE", "set: disables all `assert` checks of DeepSpeed and torch", todo))
    return found


def _judge_proxies(environ: Mapping[str, str]) -> list[Finding]:
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    proxy = next((name for name in names if environ.get(name)), None)
    if proxy is None:
        return []
    exempt = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    hosts = {word.strip().lstrip(".") for word in exempt}
    if "*" in hosts or {"localhost", "127.0.0.1"} <= hosts:
        return [ok(proxy, shown(environ[proxy]))]
    what = (
        f"{shown(environ[proxy])} is asked for the master at localhost too: `det` and trials do not reach it"
    )
    return [problem(proxy, what, "Set `no_proxy=localhost,127.0.0.1`.")]
