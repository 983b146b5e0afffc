"""Whether the installed torch fits this machine's driver and devices."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dstrial.doctor.devices import Hardware, visible
from dstrial.doctor.finding import Finding, note, ok, plural, problem
from dstrial.doctor.libraries import TorchBuild

_OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""CUDA major release -> the oldest driver that serves every release of it. Source: CUDA Compatibility, "Minor Version
Compatibility" (docs.nvidia.com/deploy/cuda-compatibility)."""

_BUILDS = {11: "CUDA 11.8 (torch 2.6 or 2.7)", 12: "CUDA 12.6"}
"""CUDA major release -> the build of torch that an older driver still serves."""

_SELECTOR = "https://pytorch.org/get-started/locally"


def judge(
    torch: TorchBuild | None, hardware: Hardware, environ: Mapping[str, str], *, is_fast: bool
) -> list[Finding]:
    """Judge a build against devices and driver.

    ``torch`` is None if there is none, which the imports tell; ``environ`` may hide devices; ``is_fast``: torch was only read and
    not asked.
    """
    if torch is None:
        return []
    if environ.get("DS_ACCELERATOR") == "cpu":
        return [ok("build", f"{torch.kind}; DS_ACCELERATOR=cpu keeps training on the CPU")]
    seen = visible(hardware, environ)[0]
    if torch.cuda is not None:
        return _judge_cuda(torch, torch.cuda, hardware, num_visible=len(seen), is_fast=is_fast)
    if torch.hip is not None:
        if hardware.devices and not hardware.num_amd:
            return [
                _wrong_build(torch, plural(len(hardware.devices), "NVIDIA device"), _best_build(hardware))
            ]
        return [_judge_availability(torch, hardware.num_amd, is_fast=is_fast)]
    if hardware.devices:
        return [_wrong_build(torch, plural(len(hardware.devices), "NVIDIA device"), _best_build(hardware))]
    if hardware.num_amd:
        return [_wrong_build(torch, plural(hardware.num_amd, "AMD device"), "ROCm")]
    return [ok("build", f"{torch.kind}, as this machine has no accelerator")]


def _judge_cuda(
    torch: TorchBuild, cuda: str, hardware: Hardware, *, num_visible: int, is_fast: bool
) -> list[Finding]:
    if hardware.num_amd and not hardware.devices:
        return [_wrong_build(torch, plural(hardware.num_amd, "AMD device"), "ROCm")]
    if hardware.driver is None:
        return [
            note(
                "build",
                f"{torch.kind}, and no NVIDIA driver: ranks train on the CPU",
                "Install NVIDIA's driver if this machine has a device; a CPU build of torch takes a tenth of the space.",
            )
        ]
    too_old = driver_too_old(cuda, hardware)
    # A compatibility package (cuda-compat) makes a newer CUDA run on an older driver: what works is no problem.
    if too_old is not None and not torch.is_available:
        return [too_old]
    findings = [_judge_availability(torch, num_visible, is_fast=is_fast)]
    for device in hardware.devices:
        if (
            device.capability
            and torch.architectures
            and not has_kernels(torch.architectures, device.capability)
        ):
            findings.append(
                problem(
                    "kernels",
                    f"{torch.kind} has no kernels for device {device.idx} ({device.name}, compute capability "
                    f"{'.'.join(map(str, device.capability))}); it has {', '.join(torch.architectures)}",
                    f"Install a build of torch that has them: see {_SELECTOR}.",
                )
            )
    return findings


def driver_too_old(cuda: str, hardware: Hardware) -> Finding | None:
    """Judge a build's CUDA release, for example ``13.0``, against the driver.

    Returns:
        A problem that says what to install; None if the driver is new enough or nothing is known.
    """
    major = int(cuda.partition(".")[0])
    driver = release(hardware.driver)
    oldest = _OLDEST_DRIVERS.get(major)
    if hardware.driver_cuda is not None:
        is_too_old = hardware.driver_cuda[0] < major
    else:
        is_too_old = oldest is not None and bool(driver) and driver < oldest
    if not is_too_old:
        return None
    needs = "a newer driver" if oldest is None else f"driver {'.'.join(map(str, oldest))} or newer"
    serves = (
        ""
        if hardware.driver_cuda is None
        else f", which serves CUDA up to {'.'.join(map(str, hardware.driver_cuda))}"
    )
    best = _best_build(hardware)
    instead = f", or a build of torch for {best} ({_SELECTOR})" if best else ""
    return problem(
        "build",
        f"torch {torch_release(cuda)} needs {needs}; the driver is {hardware.driver}{serves}",
        f"Install {needs}{instead}.",
    )


def torch_release(cuda: str) -> str:
    """Name a build by its CUDA release."""
    return f"built for CUDA {cuda}"


def has_kernels(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a build runs on a device.

    Args:
        architectures: ``sm_90`` is machine code, which runs on devices of the same major and the same or a higher minor
            number; ``compute_90`` is an intermediate language, which is translated for newer devices; a letter at the end
            (``sm_90a``) binds it to that very device.
        capability: of the device, major and minor.
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


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a driver's version; empty if there are none."""
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])


def _judge_availability(torch: TorchBuild, num_visible: int, *, is_fast: bool) -> Finding:
    if is_fast:
        return ok("build", f"{torch.kind}; whether it finds the devices was not asked (--fast)")
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
    return ok(
        "build",
        f"{torch.kind}; finds {plural(torch.num_devices, 'device')}",
    )


def _wrong_build(torch: TorchBuild, has: str, wanted: str) -> Finding:
    return problem(
        "build",
        f"{torch.kind}, on a machine with {has}: ranks train on the CPU",
        f"Install a build of torch for {wanted or 'this machine'} ({_SELECTOR}), or set DS_ACCELERATOR=cpu to say that this is "
        "meant.",
    )


def _best_build(hardware: Hardware) -> str:
    """The newest CUDA release whose builds the driver serves, in words."""
    if hardware.driver_cuda is not None:
        major = hardware.driver_cuda[0]
    else:
        driver = release(hardware.driver)
        major = max((cuda for cuda, oldest in _OLDEST_DRIVERS.items() if driver >= oldest), default=0)
    if major in _BUILDS:
        return _BUILDS[major]
    return "" if major < min(_OLDEST_DRIVERS) else f"CUDA {major}"
