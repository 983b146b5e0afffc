"""Check that torch, DeepSpeed and Determined can be imported as installed."""

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

from dstrial.doctor.devices import Hardware, visible
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.errors import install_command

_GRACE_S = 3.0
_SLOW_S = 15.0
# Append the directory of this package to sys.path, for a checkout. It comes last, so that a file which shadows a library for
# trials (for example in the working directory) also shadows it in the probe.
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from dstrial.doctor.import_probe import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class TorchBuild:
    """Properties of the torch that programs in this environment import."""

    version: str
    file: str = ""
    cuda: str | None = None  # CUDA release of the build, such as 13.0
    hip: str | None = None
    has_nccl: bool = True
    architectures: tuple[str, ...] = ()  # targets of its kernels, such as sm_90; empty if unknown
    is_available: bool = False
    num_devices: int = 0
    warnings: tuple[str, ...] = ()  # about the driver
    has_gloo: bool = True

    @property
    def kind(self) -> str:
        if self.cuda is not None:
            return f"CUDA {self.cuda}"
        return "CPU only" if self.hip is None else f"ROCm, HIP {self.hip}"


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """Properties of the imported DeepSpeed or Determined."""

    version: str
    file: str = ""
    accelerator: str | None = None  # the device that DeepSpeed chose
    cuda_mismatch: str | None = None  # why DeepSpeed rejects nvcc for this torch
    # name -> built (with the package), compiled (by an earlier program), compiled at first use, not possible
    operators: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ImportFailure:
    """A library that could not be imported."""

    package: str
    reason: str  # the exception, or the exit of the process
    place: str = ""  # file, line and function in which the import hung


@dataclasses.dataclass(frozen=True, slots=True)
class Libraries:
    """The imported libraries; None for a library that could not be imported."""

    torch: TorchBuild | None = None
    deepspeed: Package | None = None
    determined: Package | None = None
    failures: tuple[ImportFailure, ...] = ()
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
    """Parse the output of the process that imports the libraries.

    ``errors`` is its standard error. ``return_code`` is None if the process was killed at the deadline.
    """
    current = ""
    values: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    failures: list[ImportFailure] = []
    for line in output.splitlines():
        record = json.loads(line)
        if "begins" in record:
            current = record["begins"]
            continue
        current = ""
        seconds[record["stage"]] = record["seconds"]
        if "values" in record:
            values[record["stage"]] = record["values"]
        elif all(failure.reason != record["error"] for failure in failures):
            # If deepspeed fails, dstrial mostly fails with the same error: report it once.
            failures.append(ImportFailure(record["stage"], record["error"]))
    if current or return_code != 0:
        failures.append(_import_failure(current or "torch", errors, return_code, deadline_s))
    torch = values.get("torch")
    for name in ("architectures", "warnings") if torch else ():
        torch = {**(torch or {}), name: tuple((torch or {})[name])}
    deepspeed, determined = (
        Package(**values[stage]) if stage in values else None for stage in ("deepspeed", "dstrial")
    )
    build = None if torch is None else TorchBuild(**torch)
    return Libraries(build, deepspeed, determined, tuple(failures), seconds)


def _import_failure(library: str, errors: str, return_code: int | None, deadline_s: float) -> ImportFailure:
    if return_code is None or "Timeout (" in errors:
        frames = re.findall(r'^  File "(.+?)", line (\d+) in (.+)$', errors, re.MULTILINE)
        own = [frame for frame in frames if not frame[0].startswith("<")]
        place = "" if not own else f"{own[0][0]}:{own[0][1]} in {own[0][2]}"
        return ImportFailure(library, f"not imported within {deadline_s:.0f} s", place)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = f", after saying {lines[-1]!r}" if lines else ""
    how = f"by {signal.Signals(-return_code).name}" if return_code < 0 else f"with status {return_code}"
    return ImportFailure(library, f"its import ended the process {how}{said}")


def judge(
    libraries: Libraries, installed: Mapping[str, str], hardware: Hardware, environ: Mapping[str, str]
) -> list[Finding]:
    """Return findings on the libraries; ``installed`` has package name -> version."""
    findings = [_judge_failure(failure) for failure in libraries.failures]
    torch, deepspeed, determined = libraries.torch, libraries.deepspeed, libraries.determined
    if torch is not None:
        findings.append(ok("torch", f"{torch.version}, {torch.kind}{_timing(libraries, 'torch')}"))
        findings += [*_judge_copies("torch", torch, installed), *_judge_collectives(torch)]
    if deepspeed is not None:
        device = f", trains on {deepspeed.accelerator}"
        findings.append(ok("deepspeed", f"{deepspeed.version}{device}{_timing(libraries, 'deepspeed')}"))
        findings += _judge_copies("deepspeed", deepspeed, installed)
        is_left_out = deepspeed.accelerator == "cpu" and torch is not None and torch.is_available
        if is_left_out and visible(hardware, environ)[0] and "DS_ACCELERATOR" not in environ:
            what = "torch finds devices, and DeepSpeed chose the CPU"
            findings.append(
                problem("accelerator", what, "Set DS_ACCELERATOR=cuda, and look at what `ds_report` says.")
            )
    if determined is not None:
        findings += _judge_copies("determined", determined, installed)
        findings.append(ok("what trials import", f"dstrial and determined{_timing(libraries, 'dstrial')}"))
    slow = [f"{name} takes {took:.0f} s" for name, took in libraries.seconds.items() if took > _SLOW_S]
    if slow:
        todo = "Each rank pays this at its start: put the environment on a local disk."
        findings.append(note("imports", ", ".join(slow), todo))
    return findings


def _judge_collectives(torch: TorchBuild) -> list[Finding]:
    found = []
    if not torch.has_nccl and (torch.cuda is not None or torch.hip is not None):
        todo = "Install a build of torch that has it; ranks with accelerators have no other collectives."
        found.append(problem("NCCL", f"missing from a build of torch for {torch.kind}", todo))
    if not torch.has_gloo:
        todo = "Install a build of torch that has it: ranks on CPU, and the control of all others, need it."
        found.append(problem("gloo", "missing from this build of torch", todo))
    return found


def _judge_failure(failure: ImportFailure) -> Finding:
    reason = failure.reason
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
    where = f" (it hangs at {failure.place})" if failure.place else ""
    return problem(f"import {failure.package}", f"{reason}{where}", todo)


def _timing(libraries: Libraries, library: str) -> str:
    return f"; imported in {libraries.seconds.get(library, 0.0):.1f} s"


def _judge_copies(name: str, imported: TorchBuild | Package, installed: Mapping[str, str]) -> list[Finding]:
    """Report that another copy of a library is imported than the installed one."""
    said = installed.get(name)
    if said is None or said.partition("+")[0] == imported.version.partition("+")[0]:
        return []
    what = f"{imported.version} is imported from {imported.file}, and {said} is installed"
    todo = "Remove one of them; PYTHONPATH and user packages (~/.local) are usual places of the other."
    return [problem(f"{name} copies", what, todo)]
