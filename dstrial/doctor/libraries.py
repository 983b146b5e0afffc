"""Check that the libraries can be imported, and that torch suits the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.doctor.devices import Hardware, dotted, visible
from dstrial.doctor.finding import Finding, note, ok, plural, problem
from dstrial.errors import install_command

_GRACE_S = 3.0
_SLOW_S = 15.0
# Append the directory of this package to sys.path, for a checkout. It comes last, so that a file which shadows a library for
# trials (for example in the working directory) also shadows it in the probe.
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from dstrial.doctor.import_probe import main; main()"
_SELECTOR = "https://pytorch.org/get-started/locally"


@dataclasses.dataclass(frozen=True, slots=True)
class TorchBuild:
    """Properties of the torch that programs in this environment import."""

    version: str
    cuda: str | None = None  # CUDA release of the build, such as 13.0
    hip: str | None = None
    num_devices: int = 0  # that torch can use
    warnings: tuple[str, ...] = ()  # about the driver, or about devices without kernels

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
    """Import the libraries in a separate process, which is killed at the deadline."""
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
    """Parse standard output and error of the process that imports the libraries.

    ``return_code`` is None if the process was killed at the deadline.
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
        None if torch is None else TorchBuild(**{**torch, "warnings": tuple(torch["warnings"])}),
        None if deepspeed is None else DeepSpeedBuild(**deepspeed),
        failures,
        seconds,
    )


def _ending(errors: str, return_code: int | None, deadline_s: float) -> str:
    if return_code is None or "Timeout (" in errors:
        frames = re.findall(r'^  File "(.+?)", line (\d+) in (.+)$', errors, re.MULTILINE)
        own = [f" (it hangs at {file}:{line} in {name})" for file, line, name in frames if file[0] != "<"]
        return f"not imported within {deadline_s:.0f} s{own[0] if own else ''}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = f", after saying {lines[-1]!r}" if lines else ""
    how = f"by {signal.Signals(-return_code).name}" if return_code < 0 else f"with status {return_code}"
    return f"its import ended the process {how}{said}"


def judge(libraries: Libraries, hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    findings = [_judge_failure(library, reason) for library, reason in libraries.failures.items()]
    torch, deepspeed, seconds = libraries.torch, libraries.deepspeed, libraries.seconds
    if torch is not None:
        findings.append(ok("torch", f"{torch.version}, {torch.kind}{_timing(seconds, 'torch')}"))
    if deepspeed is not None:
        device = f", trains on {deepspeed.accelerator}"
        findings.append(ok("deepspeed", f"{deepspeed.version}{device}{_timing(seconds, 'deepspeed')}"))
        is_left_out = deepspeed.accelerator == "cpu" and torch is not None and torch.num_devices > 0
        if is_left_out and visible(hardware, environ)[0] and "DS_ACCELERATOR" not in environ:
            what = "torch finds devices, and DeepSpeed chose the CPU"
            todo = "Set DS_ACCELERATOR=cuda, and look at what `ds_report` says."
            findings.append(problem("accelerator", what, todo))
    if "dstrial" in seconds and "dstrial" not in libraries.failures:
        findings.append(ok("what trials import", f"dstrial and determined{_timing(seconds, 'dstrial')}"))
    slow = [f"{name} takes {took:.0f} s" for name, took in seconds.items() if took > _SLOW_S]
    if slow:
        todo = "Each rank pays this at its start: put the environment on a local disk."
        findings.append(note("imports", ", ".join(slow), todo))
    return findings if torch is None else [*findings, *judge_build(torch, hardware, environ)]


def _judge_failure(library: str, reason: str) -> Finding:
    if reason.startswith("not imported within"):
        todo = "Look at that place; a file system that is slow or gone is a usual cause. --deadline waits longer."
    elif reason.startswith("ModuleNotFoundError"):
        todo = f"`{install_command()}` installs all that dstrial needs."
    elif "accelerator" in reason.lower() and "ValueError" in reason:
        todo = "Unset DS_ACCELERATOR, or install what that accelerator needs."
    elif "SIGILL" in reason:
        todo = "This processor lacks instructions that the build uses (AVX, say): install another build."
    else:
        todo = (
            "Install it anew; a file of the same name in the working directory or on PYTHONPATH shadows it."
        )
    return problem(f"import {library}", reason, todo)


def _timing(seconds: Mapping[str, float], library: str) -> str:
    return f"; imported in {seconds.get(library, 0.0):.1f} s"


def judge_build(torch: TorchBuild, hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on whether torch's build suits the driver and the devices."""
    if environ.get("DS_ACCELERATOR") == "cpu":
        return [ok("build", f"{torch.kind}; DS_ACCELERATOR=cpu keeps training on the CPU")]
    nvidia, amd = len(hardware.devices), hardware.num_amd
    serves = "" if hardware.driver_cuda is None else f" CUDA {dotted(hardware.driver_cuda)} or older"
    if nvidia and torch.cuda is None:
        return [_wrong_build(torch, plural(nvidia, "NVIDIA device"), serves or " CUDA")]
    if amd and not nvidia and torch.hip is None:
        return [_wrong_build(torch, plural(amd, "AMD device"), " ROCm")]
    num_visible = len(visible(hardware, environ)[0]) if nvidia else amd
    if num_visible == 0:
        return [ok("build", f"{torch.kind}; no device is visible: ranks train on the CPU")]
    if torch.num_devices == 0:
        said = f": {torch.warnings[0]}" if torch.warnings else ""
        what = f"{torch.kind}, and finds none of {plural(num_visible, 'visible device')}{said}"
        instead = f"Install a newer driver, or a build of torch for{serves} ({_SELECTOR}). " if serves else ""
        todo = f"{instead}In a container, the driver capability 'compute' is needed."
        return [problem("build", what, todo)]
    findings = [ok("build", f"{torch.kind}; finds {plural(torch.num_devices, 'device')}")]
    if torch.num_devices != num_visible:
        what = f"{torch.kind}; finds {torch.num_devices} devices where the driver has {num_visible}"
        todo = "With MIG, CUDA uses one instance a process; else look at CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*."
        findings = [note("build", what, todo)]
    for warning in torch.warnings:  # torch has no kernels for a device
        findings.append(
            problem("kernels", warning, f"Install a build of torch that has them: see {_SELECTOR}.")
        )
    return findings


def _wrong_build(torch: TorchBuild, has: str, wanted: str) -> Finding:
    return problem(
        "build",
        f"{torch.kind}, on a machine with {has}: ranks train on the CPU",
        f"Install a build of torch for{wanted} ({_SELECTOR}), or set DS_ACCELERATOR=cpu to say that this is meant.",
    )
