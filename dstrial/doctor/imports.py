"""Whether torch, DeepSpeed and dstrial import, and as the copies installed."""

from __future__ import annotations

from collections.abc import Mapping

from dstrial.doctor.devices import Hardware, visible
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.doctor.libraries import ImportFailure, Libraries, TorchBuild
from dstrial.errors import install_command

_SLOW_S = 15.0


def judge(
    libraries: Libraries, installed: Mapping[str, str | None], hardware: Hardware, environ: Mapping[str, str]
) -> list[Finding]:
    """Judge the libraries that train.

    ``installed`` is distribution -> version that its metadata says; ``environ`` may hide devices.
    """
    findings = [_judge_failure(failure) for failure in libraries.failures]
    torch, deepspeed = libraries.torch, libraries.deepspeed
    if torch is not None:
        findings.append(ok("torch", f"{torch.version}, {torch.kind}{_took(libraries, 'torch')}"))
        findings += _judge_copies("torch", torch.version, torch.file, installed)
    if deepspeed is not None:
        device = "" if deepspeed.accelerator is None else f", trains on {deepspeed.accelerator}"
        findings.append(ok("deepspeed", f"{deepspeed.version}{device}{_took(libraries, 'deepspeed')}"))
        findings += _judge_copies("deepspeed", deepspeed.version, deepspeed.file, installed)
        is_left_out = deepspeed.accelerator == "cpu" and torch is not None and torch.is_available
        if is_left_out and visible(hardware, environ)[0] and "DS_ACCELERATOR" not in environ:
            findings.append(
                problem(
                    "accelerator",
                    "torch finds devices, and DeepSpeed chose the CPU",
                    "Set DS_ACCELERATOR=cuda, and look at what `ds_report` says.",
                )
            )
    if "dstrial" in libraries.seconds and not libraries.failures:
        findings.append(ok("what trials import", f"dstrial and determined{_took(libraries, 'dstrial')}"))
    slow = {name: seconds for name, seconds in libraries.seconds.items() if seconds > _SLOW_S}
    if slow:
        findings.append(
            note(
                "imports",
                ", ".join(f"{name} takes {seconds:.0f} s" for name, seconds in slow.items()),
                "Each rank pays this at its start: put the environment on a local disk.",
            )
        )
    return findings


def judge_backends(torch: TorchBuild | None, *, is_imported: bool) -> list[Finding]:
    """Judge which collectives torch has.

    Args:
        torch: the build; None if there is none.
        is_imported: whether it was asked, or only read.
    """
    if torch is None:
        return []
    findings = []
    if torch.cuda is not None or torch.hip is not None:
        if torch.nccl is None and is_imported:
            findings.append(
                problem(
                    "NCCL",
                    f"missing from a build of torch for {torch.kind}",
                    "Install a build of torch that has it; ranks with accelerators have no other collectives.",
                )
            )
        else:
            findings.append(ok("NCCL", torch.nccl or "not asked (--fast)"))
    if torch.has_gloo is False:
        todo = "Install a build of torch that has it: ranks on CPU, and the control of all others, need it."
        findings.append(problem("gloo", "missing from this build of torch", todo))
    elif torch.has_gloo:
        findings.append(ok("gloo", "there"))
    return findings


def _judge_failure(failure: ImportFailure) -> Finding:
    where = f" (it hangs at {failure.place})" if failure.place else ""
    what = f"{failure.reason}{where}"
    name = f"import {failure.library}"
    if failure.reason == "not installed":
        return problem(
            name,
            what,
            f"`pip install {failure.library}`, or `{install_command()}` for all that dstrial needs.",
        )
    if failure.reason.startswith("not imported within"):
        return problem(
            name,
            what,
            "Look at that place; a file system that is slow or gone is a usual cause. --deadline waits longer.",
        )
    if "accelerator" in failure.reason.lower() and "ValueError" in failure.reason:
        return problem(name, what, "Unset DS_ACCELERATOR, or install what that accelerator needs.")
    if "SIGILL" in failure.reason:
        return problem(
            name,
            what,
            "This processor lacks instructions that the build uses (AVX, say): install another build.",
        )
    return problem(
        name,
        what,
        "Install it anew in this environment; a file of the same name in the working directory or on PYTHONPATH shadows it.",
    )


def _took(libraries: Libraries, library: str) -> str:
    seconds = libraries.seconds.get(library)
    return "; not imported (--fast)" if seconds is None else f"; imported in {seconds:.1f} s"


def _judge_copies(name: str, imported: str, file: str, installed: Mapping[str, str | None]) -> list[Finding]:
    """Judge double copies: the version imported is not the version compared."""
    said = installed.get(name)
    if said is None or said.partition("+")[0] == imported.partition("+")[0]:
        return []
    return [
        problem(
            f"{name} copies",
            f"{imported} is imported from {file}, and {said} is installed",
            "Remove one of them; PYTHONPATH and user packages (~/.local) are usual places of the other.",
        )
    ]
