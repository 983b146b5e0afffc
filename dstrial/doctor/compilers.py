"""What compiles DeepSpeed's operators at first use, and how to train without."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from dstrial.doctor.finding import Finding, note, ok
from dstrial.doctor.libraries import DeepSpeedBuild, Libraries, Operator, TorchBuild
from dstrial.launch.stale_locks import find_stale_locks

_TOOL_TIMEOUT_S = 5.0

WITHOUT = {
    "fused_adam": 'optimizers "Adam" and "AdamW": set `"torch_adam": true` in optimizer.params',
    "cpu_adam": '"Adam" with offload_optimizer: set `"torch_adam": true` in optimizer.params',
    "fused_lamb": 'optimizer "Lamb": take "AdamW" with `"torch_adam": true`',
    "fused_lion": 'optimizer "Lion": take "AdamW" with `"torch_adam": true`',
    "cpu_lion": '"Lion" with offload_optimizer: take "AdamW" with `"torch_adam": true`',
    "cpu_adagrad": '"Adagrad" with offload_optimizer: take "AdamW" with `"torch_adam": true`',
    "async_io": 'offload to NVMe: set the offload\'s device to "cpu" (to compile it, install libaio-dev)',
}
"""Operators that training asks for -> by which setting, and how to train without. All others serve inference or special
layers. Source: DeepSpeed 0.19.8 ``runtime/engine.py`` ``get_optimizer_configuration``, ``ops/op_builder``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compilers:
    """What this machine has for compiling.

    Attributes:
        cxx: the C++ compiler that torch would call.
        cxx_version: the first line that it says of itself; None if it cannot be run.
        ninja_version: None if no ``ninja`` is on the path.
        ninja_beside_python: whether it lies beside the interpreter, where only a virtual environment that is activated has it
            on the path; trials under the master find it.
        has_python_headers: whether ``Python.h`` is there.
        headers_dir: where it was looked for.
        nvcc: path of CUDA's compiler; None without one.
        nvcc_release: for example ``13.0``; None if it cannot be run.
        stale_locks: locks of builds that were killed, on which every program that loads the operator waits.
    """

    cxx: str
    cxx_version: str | None
    ninja_version: str | None
    ninja_beside_python: bool
    has_python_headers: bool
    headers_dir: str
    nvcc: str | None
    nvcc_release: str | None
    stale_locks: tuple[str, ...] = ()


def measure() -> Compilers:
    """Look for compilers as torch 2.13's ``cpp_extension`` does."""
    cxx = os.environ.get("CXX", "c++")
    headers = sysconfig.get_paths()["include"]
    nvcc = _nvcc()
    said = "" if nvcc is None else _first_output([nvcc, "-V"], whole=True) or ""
    release = re.search(r"release (\d+\.\d+)", said)
    return Compilers(
        cxx=cxx,
        cxx_version=_first_output([*cxx.split(), "--version"]),
        ninja_version=_first_output(["ninja", "--version"]),
        ninja_beside_python=Path(sys.executable).with_name("ninja").exists(),
        has_python_headers=Path(headers, "Python.h").exists(),
        headers_dir=headers,
        nvcc=nvcc,
        nvcc_release=None if release is None else release[1],
        stale_locks=tuple(map(str, find_stale_locks())),
    )


def _nvcc() -> str | None:
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if chosen:
        path = str(Path(chosen, "bin", "nvcc"))
        return path if os.access(path, os.X_OK) else None
    found = shutil.which("nvcc")
    if found:
        return found
    usual = Path("/usr/local/cuda/bin/nvcc")
    return str(usual) if usual.exists() else None


def _first_output(command: Sequence[str], *, whole: bool = False) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout if whole else done.stdout.splitlines()[0].strip()
    return None


def judge(compilers: Compilers, libraries: Libraries) -> list[Finding]:
    """Judge what compiles, and the operators that it would compile."""
    return [
        *_judge_host(compilers),
        *_judge_nvcc(compilers, libraries.torch, libraries.deepspeed),
        *judge_operators(libraries),
        *_judge_locks(compilers),
    ]


def _judge_host(compilers: Compilers) -> list[Finding]:
    missing = _concerned(("fused_adam", "cpu_adam"))
    findings = []
    if compilers.cxx_version is None:
        findings.append(
            note(
                "C++ compiler",
                f"{compilers.cxx!r} cannot be run: no operator of DeepSpeed can be compiled",
                f"Install g++ (Debian: `apt-get install g++`), or train without: {missing}.",
            )
        )
    else:
        findings.append(ok("C++ compiler", compilers.cxx_version))
    if compilers.ninja_version is not None:
        findings.append(ok("ninja", compilers.ninja_version))
    elif compilers.ninja_beside_python:
        findings.append(
            note(
                "ninja",
                "beside the interpreter, and not on the PATH: only trials under the master find it",
                f"Activate the environment, or put {Path(sys.executable).parent} on the PATH.",
            )
        )
    else:
        findings.append(
            note(
                "ninja",
                "missing: no operator of DeepSpeed can be compiled",
                f"`pip install ninja`, or train without: {missing}.",
            )
        )
    if compilers.has_python_headers:
        findings.append(ok("Python headers", compilers.headers_dir))
    else:
        findings.append(
            note(
                "Python headers",
                f"no Python.h in {compilers.headers_dir}: no operator of DeepSpeed can be compiled",
                f"Install the headers (Debian: `apt-get install python3-dev`), or train without: {missing}.",
            )
        )
    return findings


def _judge_nvcc(
    compilers: Compilers, torch: TorchBuild | None, deepspeed: DeepSpeedBuild | None
) -> list[Finding]:
    if torch is None:
        return []
    if torch.cuda is None:
        there = "none" if compilers.nvcc is None else f"{compilers.nvcc_release or 'there'}"
        return [ok("nvcc", f"{there}; this build of torch has no use for it")]
    concerned = _concerned(WITHOUT)
    if compilers.nvcc is None or compilers.nvcc_release is None:
        where = "" if compilers.nvcc is None else f" ({compilers.nvcc} cannot be run)"
        return [
            note(
                "nvcc",
                f"missing{where}: operators of DeepSpeed that are not built cannot be compiled",
                f"Install CUDA's toolkit {torch.cuda} and set CUDA_HOME, or train without: {concerned}.",
            )
        ]
    mismatch = None if deepspeed is None else deepspeed.cuda_mismatch
    differs = deepspeed is None or not deepspeed.operators
    if mismatch is None and differs and compilers.nvcc_release.split(".")[0] != torch.cuda.split(".")[0]:
        mismatch = f"it is {compilers.nvcc_release}, and torch is built with {torch.cuda}"
    if mismatch is not None:
        return [
            note(
                "nvcc",
                f"{compilers.nvcc_release}, which DeepSpeed refuses: {mismatch}",
                f"Install CUDA's toolkit {torch.cuda} and set CUDA_HOME to it, or train without: {concerned}.",
            )
        ]
    return [ok("nvcc", f"{compilers.nvcc_release} ({compilers.nvcc}); torch has CUDA {torch.cuda}")]


def judge_operators(libraries: Libraries) -> list[Finding]:
    """Judge which of DeepSpeed's operators are built, would be compiled, or cannot be."""
    deepspeed = libraries.deepspeed
    if deepspeed is None or not deepspeed.operators:
        return []
    by_fate: dict[str, list[Operator]] = {}
    for operator in deepspeed.operators:
        by_fate.setdefault(_fate(operator), []).append(operator)
    findings = [
        ok(f"operators {fate}", ", ".join(operator.name for operator in by_fate[fate]))
        for fate in ("built", "compiled", "compiled at first use")
        if fate in by_fate
    ]
    lost = [operator.name for operator in by_fate.get("not possible", [])]
    wanted = [name for name in lost if name in WITHOUT]
    if not wanted:
        rest = f"{', '.join(lost)}; no optimizer needs them"
        return findings + ([ok("operators not possible", rest)] if lost else [])
    if wanted == ["async_io"]:
        return [
            *findings,
            ok("operators not possible", f"{', '.join(lost)}; {_concerned(wanted)}"),
        ]
    todo = f"`ds_report` says why; to train without: {_concerned(wanted)}."
    return [*findings, note("operators not possible", ", ".join(lost), todo)]


def _fate(operator: Operator) -> str:
    if operator.is_prebuilt:
        return "built"
    if operator.is_compiled:
        return "compiled"
    return "compiled at first use" if operator.is_compatible else "not possible"


def _judge_locks(compilers: Compilers) -> list[Finding]:
    if not compilers.stale_locks:
        return []
    return [
        note(
            "stale locks",
            f"a build that was killed left {', '.join(compilers.stale_locks)}: whoever loads the operator waits for ever",
            "Start trials with dstrial's launcher, which removes such locks, or remove them.",
        )
    ]


def _concerned(names: Sequence[str] | dict[str, str]) -> str:
    return "; ".join(f"{name} ({WITHOUT[name]})" for name in names if name in WITHOUT)
