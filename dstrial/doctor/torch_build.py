"""Check that the installed torch supports this machine's driver and devices."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dstrial.doctor.devices import Hardware, dotted, visible
from dstrial.doctor.finding import Finding, note, ok, plural, problem
from dstrial.doctor.libraries import TorchBuild

# CUDA major release -> the oldest driver that supports all its releases. Source: CUDA Compatibility, "Minor Version
# Compatibility" (docs.nvidia.com/deploy/cuda-compatibility).
_OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
# CUDA major release that a driver supports -> the build of torch for that driver.
_BUILDS = {11: "CUDA 11.8 (torch 2.6 or 2.7)", 12: "CUDA 12.6"}
_SELECTOR = "https://pytorch.org/get-started/locally"


def judge(torch: TorchBuild | None, hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    if torch is None:  # a failed import has its own finding
        return []
    if environ.get("DS_ACCELERATOR") == "cpu":
        return [ok("build", f"{torch.kind}; DS_ACCELERATOR=cpu keeps training on the CPU")]
    nvidia, amd = len(hardware.devices), hardware.num_amd
    if nvidia and torch.cuda is None:
        return [_wrong_build(torch, plural(nvidia, "NVIDIA device"), _best_build(hardware))]
    if amd and not nvidia and torch.hip is None:
        return [_wrong_build(torch, plural(amd, "AMD device"), "ROCm")]
    if torch.cuda is not None:
        return _judge_cuda(torch, torch.cuda, hardware, len(visible(hardware, environ)[0]))
    if torch.hip is not None:
        return [_judge_availability(torch, amd)]
    return [ok("build", f"{torch.kind}, as this machine has no accelerator")]


def _judge_cuda(torch: TorchBuild, cuda: str, hardware: Hardware, num_visible: int) -> list[Finding]:
    if hardware.driver is None:
        return [
            note(
                "build",
                f"{torch.kind}, and no NVIDIA driver: ranks train on the CPU",
                "Install NVIDIA's driver if this machine has a device; a CPU build of torch takes a tenth of the space.",
            )
        ]
    too_old = _driver_too_old(cuda, hardware)
    # The package cuda-compat allows a newer CUDA on an older driver.
    if too_old is not None and not torch.is_available:
        return [too_old]
    findings = [_judge_availability(torch, num_visible)]
    for device in hardware.devices:
        capability = device.capability
        if capability and torch.architectures and not has_kernels(torch.architectures, capability):
            what = (
                f"{torch.kind} has no kernels for device {device.idx} ({device.name}, compute capability "
                f"{dotted(capability)}); it has {', '.join(torch.architectures)}"
            )
            findings.append(
                problem("kernels", what, f"Install a build of torch that has them: see {_SELECTOR}.")
            )
    return findings


def _driver_too_old(cuda: str, hardware: Hardware) -> Finding | None:
    major = int(cuda.partition(".")[0])
    driver = _release(hardware.driver)
    oldest = _OLDEST_DRIVERS.get(major)
    if hardware.driver_cuda is not None:
        is_too_old = hardware.driver_cuda[0] < major
    else:
        is_too_old = oldest is not None and bool(driver) and driver < oldest
    if not is_too_old:
        return None
    needs = "a newer driver" if oldest is None else f"driver {dotted(oldest)} or newer"
    serves = (
        "" if hardware.driver_cuda is None else f", which serves CUDA up to {dotted(hardware.driver_cuda)}"
    )
    best = _best_build(hardware)
    instead = f", or a build of torch for {best} ({_SELECTOR})" if best else ""
    what = f"torch built for CUDA {cuda} needs {needs}; the driver is {hardware.driver}{serves}"
    return problem("build", what, f"Install {needs}{instead}.")


def has_kernels(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return whether a torch build runs on a device of this compute capability.

    ``architectures`` are those that the build was compiled for. ``sm_90`` is machine code for the same major and the same or a
    higher minor number; ``compute_90`` is compiled for newer devices at load time; ``sm_90a`` runs on that device only.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if found is None:
            continue
        kind, major, minor, bound = found[1], int(found[2]), int(found[3]), found[4]
        if (major, minor) == capability:
            return True
        if bound == "a":
            continue
        if kind == "sm" and major == capability[0] and minor < capability[1]:
            return True
        if kind == "compute" and (major, minor) < capability and not bound:
            return True
    return False


def _release(version: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])


def _judge_availability(torch: TorchBuild, num_visible: int) -> Finding:
    if num_visible == 0:
        return ok("build", f"{torch.kind}; no device is visible: ranks train on the CPU")
    if not torch.is_available:
        said = f": {torch.warnings[0]}" if torch.warnings else ""
        return problem(
            "build",
            f"{torch.kind}, and finds none of {plural(num_visible, 'visible device')}{said}",
            "Let `torch.zeros(1, device='cuda')` say the cause. In a container, the driver capability 'compute' is needed.",
        )
    if torch.num_devices != num_visible:
        return note(
            "build",
            f"{torch.kind}; finds {torch.num_devices} devices where the driver has {num_visible}",
            "With MIG, CUDA uses one instance a process; otherwise look at CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*.",
        )
    return ok("build", f"{torch.kind}; finds {plural(torch.num_devices, 'device')}")


def _wrong_build(torch: TorchBuild, has: str, wanted: str) -> Finding:
    return problem(
        "build",
        f"{torch.kind}, on a machine with {has}: ranks train on the CPU",
        f"Install a build of torch for {wanted or 'this machine'} ({_SELECTOR}), or set DS_ACCELERATOR=cpu to say that this is "
        "meant.",
    )


def _best_build(hardware: Hardware) -> str:
    """Return the newest CUDA build that the driver supports; empty if there is none."""
    if hardware.driver_cuda is not None:
        major = hardware.driver_cuda[0]
    else:
        driver = _release(hardware.driver)
        major = max((cuda for cuda, oldest in _OLDEST_DRIVERS.items() if driver >= oldest), default=0)
    if major in _BUILDS:
        return _BUILDS[major]
    return "" if major < min(_OLDEST_DRIVERS) else f"CUDA {major}"
