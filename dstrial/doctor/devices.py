"""A machine's accelerators, their users and visibility: values and judgements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dstrial.doctor.finding import Finding, note, ok, plural, problem, size

_FULL_SHARE = 0.1
_UNSEEN_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceUser:
    """A process that uses a device.

    Attributes:
        pid: its process id, as the driver says; in a container that may be the host's.
        name: the program; empty if it cannot be seen from here.
        account: whose it is; empty if it cannot be seen from here.
        num_bytes: device memory that it holds; None if the driver does not say.
    """

    pid: int
    name: str
    account: str
    num_bytes: int | None

    def __str__(self) -> str:
        who = f"{self.name} of {self.account}" if self.name else "not visible from here"
        memory = "" if self.num_bytes is None else f", {size(self.num_bytes)}"
        return f"process {self.pid} ({who}{memory})"


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device.

    Attributes:
        idx: its index in the driver's order, that of ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
        name: its model.
        uuid: what names it.
        total_bytes: its memory.
        used_bytes: how much of it is taken.
        capability: compute capability, major and minor; None if the driver does not say.
        users: the processes that compute on it.
        is_mig: whether it is divided into MIG instances, and cannot be used but through them.
        mig_uuids: its instances.
        compute_mode: ``default``, or who may use it.
        num_memory_errors: uncorrected errors of its memory since the driver was loaded; None without such a count.
        needs_reset: whether rows of its memory wait for a reset to be replaced.
    """

    idx: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int] | None = None
    users: tuple[DeviceUser, ...] = ()
    is_mig: bool = False
    mig_uuids: tuple[str, ...] = ()
    compute_mode: str = "default"
    num_memory_errors: int | None = None
    needs_reset: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The accelerators of this machine.

    Attributes:
        driver: release of NVIDIA's driver; None without one.
        driver_cuda: newest CUDA release that the driver serves, major and minor; None without one.
        error: why the driver's library (NVML) did not answer; empty if it did, or if there is no driver at all.
        devices: NVIDIA devices.
        num_amd: how many AMD devices the kernel lists.
    """

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    error: str = ""
    devices: tuple[Device, ...] = ()
    num_amd: int = 0


def visible(hardware: Hardware, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Say what programs see of the devices.

    Returns:
        The devices or MIG instances that ``CUDA_VISIBLE_DEVICES`` leaves, by UUID; and its first word that names none, if there
        is any: CUDA ignores whatever comes after it.
    """
    whole = [device.uuid for device in hardware.devices if not device.is_mig]
    instances = [uuid for device in hardware.devices for uuid in device.mig_uuids]
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return whole + instances, []
    found, unknown = [], []
    for word in [word.strip() for word in value.split(",") if word.strip()]:
        if word.isdigit() and int(word) < len(hardware.devices):
            device = hardware.devices[int(word)]
            found.append(device.mig_uuids[0] if device.is_mig and device.mig_uuids else device.uuid)
        elif len(word) > 4 and (match := [uuid for uuid in whole + instances if uuid.startswith(word)]):
            found.append(match[0])
        else:
            unknown.append(word)
            break
    return found, unknown


def judge(hardware: Hardware, environ: Mapping[str, str], *, num_required: int = 0) -> list[Finding]:
    """Judge the devices; ``environ`` may hide devices or ask for one.

    ``num_required`` is how many accelerators training needs.
    """
    findings = [_judge_driver(hardware)]
    for device in hardware.devices:
        findings += judge_device(device)
    findings += _judge_visibility(hardware, environ)
    return findings + _judge_required(hardware, environ, num_required)


def _judge_driver(hardware: Hardware) -> Finding:
    if hardware.error:
        todo = (
            "Reboot, or reload the kernel module, so that it is the release of the installed library."
            if "mismatch" in hardware.error.lower()
            else "Install the driver's libraries of the same release (in a container, start it with the NVIDIA runtime and "
            "the driver capability 'utility'); without NVML the master offers CPU slots."
        )
        return problem(
            "driver", f"{hardware.driver or 'there'}, but NVML does not answer: {hardware.error}", todo
        )
    if hardware.driver is None:
        rest = f"; {plural(hardware.num_amd, 'AMD device')}" if hardware.num_amd else ""
        return ok("driver", f"none of NVIDIA's{rest or ': ranks train on the CPU'}")
    if not hardware.devices:
        return problem(
            "driver",
            f"{hardware.driver}, and no device",
            "Look into the kernel's log (`dmesg | grep -i nvrm`) for why it finds none; in a container, pass the devices in.",
        )
    serves = "" if hardware.driver_cuda is None else f", CUDA up to {_dotted(hardware.driver_cuda)}"
    return ok("driver", f"{hardware.driver}{serves}; NVML answers")


def judge_device(device: Device) -> list[Finding]:
    """Judge one device: what it is, and then what is wrong with it, one finding each."""
    name = f"device {device.idx}"
    facts = [
        device.name,
        size(device.total_bytes),
        f"{size(max(0, device.total_bytes - device.used_bytes))} free",
    ]
    if device.capability is not None:
        facts.append(f"compute capability {_dotted(device.capability)}")
    if device.is_mig:
        facts.append(f"{plural(len(device.mig_uuids), 'MIG instance')}")
    found = [ok(name, ", ".join(facts))]
    if device.is_mig and not device.mig_uuids:
        found.append(
            problem(
                f"{name} MIG",
                "divided into no MIG instance",
                "Make instances (`nvidia-smi mig -cgi … -C`), or switch MIG off (`nvidia-smi -mig 0`).",
            )
        )
    if device.compute_mode == "prohibited" or (device.compute_mode != "default" and device.users):
        found.append(
            problem(
                f"{name} mode",
                f"the compute mode is {device.compute_mode}",
                "Set it to default with `nvidia-smi -c 0`, or take another device (CUDA_VISIBLE_DEVICES).",
            )
        )
    return [*found, *_judge_use(name, device), *_judge_memory(name, device)]


def _judge_use(name: str, device: Device) -> list[Finding]:
    free = device.total_bytes - device.used_bytes
    what = f"in use by {', '.join(map(str, device.users))}" if device.users else ""
    if not what and device.used_bytes > max(_UNSEEN_BYTES, device.total_bytes // 10):
        what = f"{size(device.used_bytes)} are taken by processes that cannot be seen from here"
    if not what:
        return []
    todo = (
        "Wait for them, or choose other devices: `CUDA_VISIBLE_DEVICES=… dstrial up` (or `dstrial run`); the master does not see "
        "what other programs use."
    )
    is_full = device.total_bytes > 0 and free < _FULL_SHARE * device.total_bytes
    return [(problem if is_full else note)(f"{name} use", f"{what}; {size(free)} free", todo)]


def _judge_memory(name: str, device: Device) -> list[Finding]:
    found = []
    if device.num_memory_errors:
        found.append(
            note(
                f"{name} memory",
                f"{device.num_memory_errors} uncorrected memory errors since the driver was loaded",
                "Reset or reboot; if they come back, the device is defective.",
            )
        )
    if device.needs_reset:
        found.append(
            note(
                f"{name} memory",
                "rows of its memory wait to be replaced",
                "Reset it (`nvidia-smi -r`) or reboot.",
            )
        )
    return found


def _judge_visibility(hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or not hardware.devices:
        return []
    seen, unknown = visible(hardware, environ)
    if unknown and unknown != ["-1"]:
        return [
            problem(
                "CUDA_VISIBLE_DEVICES",
                f"{value!r} names no device of this machine by {unknown[0]!r}; what comes after that word is ignored",
                f"Name indices below {len(hardware.devices)} or UUIDs that `nvidia-smi -L` lists, or unset it.",
            )
        ]
    if not seen:
        return [
            note(
                "CUDA_VISIBLE_DEVICES",
                f"{value!r} hides all {len(hardware.devices)} devices: ranks train on the CPU",
                "Unset it to train on them.",
            )
        ]
    return [ok("CUDA_VISIBLE_DEVICES", f"{value!r}: {len(seen)} of {len(hardware.devices)} devices")]


def _judge_required(hardware: Hardware, environ: Mapping[str, str], num_required: int) -> list[Finding]:
    chosen = environ.get("DS_ACCELERATOR")
    asked_by = "--require-gpus"
    if num_required == 0 and chosen == "cuda":
        num_required, asked_by = 1, "DS_ACCELERATOR=cuda"
    if num_required == 0:
        return []
    num_seen = len(visible(hardware, environ)[0]) or (0 if hardware.devices else hardware.num_amd)
    if chosen == "cpu":
        num_seen = 0
    if num_seen >= num_required:
        return [ok("accelerators", f"{num_seen} visible, {num_required} asked for ({asked_by})")]
    if chosen == "cpu" and (hardware.devices or hardware.num_amd):
        todo = "Unset DS_ACCELERATOR, which keeps DeepSpeed on the CPU."
    elif len(hardware.devices) >= num_required:
        todo = "Unset CUDA_VISIBLE_DEVICES, which hides devices."
    elif hardware.devices:
        todo = "Ask for fewer, or move to a machine that has more."
    else:
        todo = (
            "Install the vendor's driver (in a container, pass the devices in); to train on the CPU, unset DS_ACCELERATOR or set "
            "it to cpu."
        )
    return [problem("accelerators", f"{num_seen} visible; expected {num_required} ({asked_by})", todo)]


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
