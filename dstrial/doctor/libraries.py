"""Check imports of libraries, torch's build, and compilers for DeepSpeed's ops."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.doctor.devices import Hardware, dotted
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.errors import install_command
from dstrial.launch.start_watch import WITHOUT_OPERATOR
from dstrial.visible_text import plural

_GRACE_S = 3.0  # the importing process gets this time beyond its deadline to dump its stacks and exit
_SLOW_S = 15.0  # a longer import is reported as slow
_TOOL_TIMEOUT_S = 5.0  # for a compiler to print its version
# Append the directory of this package to sys.path, for a checkout. It comes last, so that a file which shadows a library for
# trials (for example in the working directory) also shadows it in the probe.
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from dstrial.doctor.import_probe import main; main()"
_SELECTOR = "https://pytorch.org/get-started/locally"  # page on which users choose a build of torch


@dataclasses.dataclass(frozen=True, slots=True)
class TorchBuild:
    """Properties of the torch that programs in this environment import."""

    version: str
    cuda: str | None = None  # CUDA release of the build, such as 13.0
    hip: str | None = None
    num_devices: int = 0  # that torch can use
    warnings: Sequence[str] = ()  # about the driver, or about devices without kernels

    @property
    def kind(self) -> str:
        if self.cuda is not None:
            return f"CUDA {self.cuda}"
        return "CPU only" if self.hip is None else f"ROCm, HIP {self.hip}"


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedBuild:
    """Properties of the imported DeepSpeed."""

    version: str
    accelerator: str  # the device that DeepSpeed chose
    cuda_mismatch: str | None = None  # why DeepSpeed rejects nvcc for this torch


@dataclasses.dataclass(frozen=True, slots=True)
class Libraries:
    """The imported libraries; None for a library that could not be imported."""

    torch: TorchBuild | None = None
    deepspeed: DeepSpeedBuild | None = None
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # library -> reason
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # library -> import time


def import_all(deadline_s: float) -> Libraries:
    """Import torch, DeepSpeed and dstrial in a process that is killed at the deadline."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(deadline_s), str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return_code: int | None = process.wait(deadline_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            return_code = None
        finally:
            # Also kill compilers that the probe has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return read_probe(texts[0], texts[1], return_code, deadline_s)


def read_probe(output: str, errors: str, return_code: int | None, deadline_s: float) -> Libraries:
    """Return which of torch, DeepSpeed and dstrial could be imported, with versions.

    ``output`` and ``errors`` are the standard output and error of the process that imported the libraries. ``return_code`` is
    None if the process was killed after ``deadline_s`` seconds; the library that it was importing then counts as failed.
    """
    current = ""
    values: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    for line in output.splitlines():
        record = json.loads(line)
        current = record.get("begins", "")
        if current:
            continue
        seconds[record["stage"]] = record["seconds"]
        if "values" in record:
            values[record["stage"]] = record["values"]
        elif record["error"] not in failures.values():
            # If deepspeed fails, dstrial mostly fails with the same error: report it once.
            failures[record["stage"]] = record["error"]
    if current or return_code != 0:
        failures[current or "torch"] = _ending(errors, return_code, deadline_s)
    torch, deepspeed = values.get("torch"), values.get("deepspeed")
    return Libraries(
        None if torch is None else TorchBuild(**torch),
        None if deepspeed is None else DeepSpeedBuild(**deepspeed),
        failures,
        seconds,
    )


def _ending(errors: str, return_code: int | None, deadline_s: float) -> str:
    if return_code is None or "Timeout (" in errors:
        frames = re.findall(r'^  File "(.+?)", line (\d+) in (.+)$', errors, re.MULTILINE)
        own = [f" (it hangs at {file}:{line} in {name})" for file, line, name in frames if file[0] != "<"]
        return f"not imported within {deadline_s:.0f} s{own[0] if own else ''}"
    how = f"by {signal.Signals(-return_code).name}" if return_code < 0 else f"with status {return_code}"
    said = f", after saying {errors.strip().splitlines()[-1]!r}" if errors.strip() else ""
    return f"its import ended the process {how}{said}"


def judge(libraries: Libraries, hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on the imports, and on whether torch suits the devices."""
    findings = [_judge_failure(library, reason) for library, reason in libraries.failures.items()]
    torch, deepspeed = libraries.torch, libraries.deepspeed
    if torch is not None:
        findings.append(ok("torch", f"{torch.version}, {torch.kind}"))
    if deepspeed is not None:
        findings.append(ok("deepspeed", f"{deepspeed.version}, trains on {deepspeed.accelerator}"))
        has_devices = torch is not None and torch.num_devices > 0
        if has_devices and deepspeed.accelerator == "cpu" and "DS_ACCELERATOR" not in environ:
            what = "torch finds devices, and DeepSpeed chose the CPU"
            todo = "Set DS_ACCELERATOR=cuda, and look at what `ds_report` says."
            findings.append(problem("accelerator", what, todo))
    seconds = libraries.seconds
    took = ", ".join(f"{name} takes {of_import:.1f} s" for name, of_import in seconds.items())
    if max(seconds.values(), default=0.0) > _SLOW_S:
        todo = "Each rank pays this at its start: put the environment on a local disk."
        findings.append(note("imports", took, todo))
    elif took:
        findings.append(ok("imports", took))
    return findings if torch is None else [*findings, *judge_build(torch, hardware, environ)]


def _judge_failure(library: str, reason: str) -> Finding:
    if reason.startswith("not imported within"):
        todo = "Look at that place; a file system that is slow or gone is a usual cause. --deadline waits longer."
    elif reason.startswith("ModuleNotFoundError"):
        todo = f"`{install_command()}` installs all that dstrial needs."
    elif "accelerator" in reason.lower() and "ValueError" in reason:
        todo = "Unset DS_ACCELERATOR, or install what that accelerator needs."
    else:
        todo = (
            "Install it anew; a file of the same name in the working directory or on PYTHONPATH shadows it, or this processor "
            "lacks instructions that the build uses (SIGILL)."
        )
    return problem(f"import {library}", reason, todo)


def judge_build(torch: TorchBuild, hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on whether torch's build suits the driver and the devices."""
    if environ.get("DS_ACCELERATOR") == "cpu":
        return [ok("build", f"{torch.kind}; DS_ACCELERATOR=cpu keeps training on the CPU")]
    has_amd = any(slot.kind == "rocm" for slot in hardware.visible)
    serves = "" if hardware.driver_cuda is None else f" {dotted(hardware.driver_cuda)} or older"
    wanted = "ROCm" if has_amd else f"CUDA{serves}"
    another = f"Install a build of torch for {wanted} ({_SELECTOR})"
    if (hardware.devices and torch.cuda is None) or (has_amd and torch.hip is None):
        what = f"{torch.kind}, on a machine with other devices: ranks train on the CPU"
        return [problem("build", what, f"{another}, or set DS_ACCELERATOR=cpu to say that this is meant.")]
    num_visible = len(hardware.visible)
    if num_visible == 0:
        return [ok("build", f"{torch.kind}; no device is visible: ranks train on the CPU")]
    if torch.num_devices == 0:
        said = "".join(f": {warning}" for warning in torch.warnings[:1])
        what = f"{torch.kind}, and finds none of {plural(num_visible, 'visible device')}{said}"
        todo = f"{another}, or a newer driver. In a container, the driver capability 'compute' is needed."
        return [problem("build", what, todo)]
    findings = [ok("build", f"{torch.kind}; finds {plural(torch.num_devices, 'device')}")]
    for warning in torch.warnings:  # torch has no kernels for a device
        findings.append(
            problem("kernels", warning, f"Install a build of torch that has them: see {_SELECTOR}.")
        )
    return findings


# ---- compilers for DeepSpeed's operators, which are compiled at first use ----------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Compilers:
    """The tools on this machine that compile DeepSpeed's operators; None if missing."""

    cxx: str | None  # output of ``--version``
    ninja: str | None  # output of ``--version``
    headers: str | None  # directory of Python.h
    nvcc: str | None  # CUDA release, such as 13.0


def measure_compilers() -> Compilers:
    """Look for compilers in the places that torch 2.13's ``cpp_extension`` uses."""
    headers = sysconfig.get_paths()["include"]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    release = re.search(r"release (\d+\.\d+)", _output([nvcc, "-V"]) or "")
    return Compilers(
        cxx=_output([*os.environ.get("CXX", "c++").split(), "--version"]),
        # Trials under the master find ninja beside Python, too.
        ninja=_output(["ninja", "--version"]) or _output([f"{sys.prefix}/bin/ninja", "--version"]),
        headers=headers if Path(headers, "Python.h").exists() else None,
        nvcc=None if release is None else release[1],
    )


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


def judge_compilers(compilers: Compilers, libraries: Libraries) -> list[Finding]:
    torch, deepspeed = libraries.torch, libraries.deepspeed
    tools = {
        "C++ compiler": (compilers.cxx, "Install g++ (Debian: `apt-get install g++`)"),
        "ninja": (compilers.ninja, "`pip install ninja`"),
        "Python headers": (compilers.headers, "Install Python.h (Debian: `apt-get install python3-dev`)"),
    }
    refused = ""
    if torch is not None and torch.cuda is not None:
        refused = (deepspeed.cuda_mismatch if deepspeed is not None else "") or ""
        install = f"Install CUDA's toolkit {torch.cuda} and set CUDA_HOME to it"
        tools["nvcc"] = (None if refused else compilers.nvcc, install)
    without = "; ".join(f"{name} ({setting})" for name, setting in WITHOUT_OPERATOR.items())
    found = []
    for name, (there, install) in tools.items():
        if there is not None:
            found.append(ok(name, there.partition("\n")[0]))
            continue
        why = refused if name == "nvcc" and refused else "missing"
        what = f"{why}: operators of DeepSpeed that are not built cannot be compiled"
        found.append(note(name, what, f"{install}, or train without operators: {without}."))
    return found
