"""Check the compilers for DeepSpeed's operators, which are compiled at first use."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from dstrial.doctor.finding import Finding, note, ok
from dstrial.doctor.libraries import Libraries
from dstrial.launch.start_watch import WITHOUT_OPERATOR

_TOOL_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Compilers:
    """Compilers and tools of this machine; versions are None if a tool cannot be run."""

    cxx: str
    cxx_version: str | None
    ninja_version: str | None
    ninja_beside_python: bool  # whether ninja is in the directory of this Python, where trials find it
    has_python_headers: bool
    headers_dir: str
    nvcc: str | None
    nvcc_release: str | None  # such as 13.0


def measure() -> Compilers:
    """Find this machine's compilers as torch 2.13's ``cpp_extension`` would."""
    cxx = os.environ.get("CXX", "c++")
    headers = sysconfig.get_paths()["include"]
    nvcc = _nvcc()
    release = None if nvcc is None else re.search(r"release (\d+\.\d+)", _output([nvcc, "-V"]) or "")
    return Compilers(
        cxx=cxx,
        cxx_version=_first_line([*cxx.split(), "--version"]),
        ninja_version=_first_line(["ninja", "--version"]),
        ninja_beside_python=Path(sys.executable).with_name("ninja").exists(),
        has_python_headers=Path(headers, "Python.h").exists(),
        headers_dir=headers,
        nvcc=nvcc,
        nvcc_release=None if release is None else release[1],
    )


def _nvcc() -> str | None:
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if chosen:
        path = str(Path(chosen, "bin", "nvcc"))
        return path if os.access(path, os.X_OK) else None
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def _output(command: Sequence[str]) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
    return None


def _first_line(command: Sequence[str]) -> str | None:
    lines = (_output(command) or "").splitlines()
    return lines[0].strip() if lines else None


def judge(compilers: Compilers, libraries: Libraries) -> list[Finding]:
    return [*_judge_host(compilers), *_judge_nvcc(compilers, libraries)]


def _judge_host(compilers: Compilers) -> list[Finding]:
    without = f"or train without: {_workarounds(('fused_adam', 'cpu_adam'))}."
    lost = "no operator of DeepSpeed can be compiled"
    findings = []
    if compilers.cxx_version is None:
        todo = f"Install g++ (Debian: `apt-get install g++`), {without}"
        findings.append(note("C++ compiler", f"{compilers.cxx!r} cannot be run: {lost}", todo))
    else:
        findings.append(ok("C++ compiler", compilers.cxx_version))
    if compilers.ninja_version is not None:
        findings.append(ok("ninja", compilers.ninja_version))
    elif compilers.ninja_beside_python:
        what = "beside the interpreter, and not on the PATH: only trials under the master find it"
        todo = f"Activate the environment, or put {Path(sys.executable).parent} on the PATH."
        findings.append(note("ninja", what, todo))
    else:
        findings.append(note("ninja", f"missing: {lost}", f"`pip install ninja`, {without}"))
    if compilers.has_python_headers:
        findings.append(ok("Python headers", compilers.headers_dir))
    else:
        todo = f"Install the headers (Debian: `apt-get install python3-dev`), {without}"
        findings.append(note("Python headers", f"no Python.h in {compilers.headers_dir}: {lost}", todo))
    return findings


def _judge_nvcc(compilers: Compilers, libraries: Libraries) -> list[Finding]:
    torch, deepspeed = libraries.torch, libraries.deepspeed
    if torch is None or torch.cuda is None:
        return []
    install = f"Install CUDA's toolkit {torch.cuda} and set CUDA_HOME to it, or train without: {_workarounds(WITHOUT_OPERATOR)}."
    if compilers.nvcc_release is None:
        where = "" if compilers.nvcc is None else f" ({compilers.nvcc} cannot be run)"
        what = f"missing{where}: operators of DeepSpeed that are not built cannot be compiled"
        return [note("nvcc", what, install)]
    if deepspeed is not None and deepspeed.cuda_mismatch is not None:
        what = f"{compilers.nvcc_release}, which DeepSpeed refuses: {deepspeed.cuda_mismatch}"
        return [note("nvcc", what, install)]
    return [ok("nvcc", f"{compilers.nvcc_release} ({compilers.nvcc}); torch has CUDA {torch.cuda}")]


def _workarounds(names: Iterable[str]) -> str:
    return "; ".join(f"{name} ({WITHOUT_OPERATOR[name]})" for name in names)
