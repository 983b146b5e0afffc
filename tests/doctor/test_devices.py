import dataclasses

import pytest

from dstrial.doctor import devices
from dstrial.doctor.devices import Device, Hardware

GIB = 1 << 30
FIRST = Device(0, "H200", "GPU-aaaa1111", 141 * GIB, 0)
SECOND = Device(1, "H200", "GPU-bbbb2222", 141 * GIB, 0)
TWO = Hardware(driver="580.65.06", driver_cuda=(13, 0), devices=(FIRST, SECOND))
NO_HARDWARE = Hardware()


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


def the_problem(findings):
    (found,) = [finding for finding in findings if finding.status == "problem"]
    return found


@pytest.mark.parametrize(
    ("used_gib", "users", "status", "said"),
    [
        (20, ("process 4711 (python of ada, 20 GiB)",), "note", "process 4711 (python of ada, 20 GiB)"),
        (135, ("process 4711 (not visible from here)",), "problem", "process 4711 (not visible from here)"),
        (50, (), "note", "cannot be seen from here"),
    ],
)
def test_device_in_use_is_reported_with_its_processes(used_gib, users, status, said):
    device = dataclasses.replace(FIRST, used_bytes=used_gib * GIB, users=users)
    (_, found) = devices.judge_device(device)
    assert found.status == status
    assert said in found.what
    assert f"{141 - used_gib} GiB free" in found.what


def test_driver_memory_is_not_reported_as_use():
    assert len(devices.judge_device(dataclasses.replace(FIRST, used_bytes=600 << 20))) == 1


def test_mig_device_without_instances_is_problem():
    mig = dataclasses.replace(FIRST, is_mig=True)
    assert "nvidia-smi mig" in the_problem(devices.judge_device(mig)).todo
    assert len(devices.judge_device(dataclasses.replace(mig, mig_uuids=("MIG-1", "MIG-2")))) == 1


@pytest.mark.parametrize(
    ("value", "seen", "unknown"),
    [
        (None, ["GPU-aaaa1111", "GPU-bbbb2222"], []),
        ("", [], []),
        ("1", ["GPU-bbbb2222"], []),
        ("1,0", ["GPU-bbbb2222", "GPU-aaaa1111"], []),
        ("GPU-bbbb", ["GPU-bbbb2222"], []),
        ("2", [], ["2"]),
        ("-1", [], ["-1"]),
        ("NoDevFiles", [], ["NoDevFiles"]),
        ("0,9,1", ["GPU-aaaa1111"], ["9"]),
    ],
)
def test_visible_devices_follow_cuda_rules(value, seen, unknown):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert devices.visible(TWO, environ) == (seen, unknown)


def test_mig_instances_are_visible_by_uuid():
    divided = dataclasses.replace(
        TWO, devices=(dataclasses.replace(FIRST, is_mig=True, mig_uuids=("MIG-1", "MIG-2")), SECOND)
    )
    assert devices.visible(divided, {})[0] == ["GPU-bbbb2222", "MIG-1", "MIG-2"]
    assert devices.visible(divided, {"CUDA_VISIBLE_DEVICES": "MIG-2"})[0] == ["MIG-2"]


def test_unknown_device_is_problem_hidden_devices_are_note():
    assert "'7'" in the_problem(devices.judge(TWO, {"CUDA_VISIBLE_DEVICES": "7"})).what
    assert statuses(devices.judge(TWO, {"CUDA_VISIBLE_DEVICES": ""}))["CUDA_VISIBLE_DEVICES"] == "note"
    assert statuses(devices.judge(TWO, {"CUDA_VISIBLE_DEVICES": "-1"}))["CUDA_VISIBLE_DEVICES"] == "note"


@pytest.mark.parametrize(
    ("hardware", "environ", "required", "mends"),
    [
        (NO_HARDWARE, {}, 1, "driver"),
        (NO_HARDWARE, {"DS_ACCELERATOR": "cuda"}, 0, "driver"),
        (TWO, {"CUDA_VISIBLE_DEVICES": ""}, 1, "CUDA_VISIBLE_DEVICES"),
        (TWO, {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda"}, 0, "CUDA_VISIBLE_DEVICES"),
        (TWO, {"DS_ACCELERATOR": "cpu"}, 1, "DS_ACCELERATOR"),
        (TWO, {}, 3, "machine that has more"),
    ],
)
def test_missing_required_accelerator_names_cause(hardware, environ, required, mends):
    assert mends in the_problem(devices.judge(hardware, environ, num_required=required)).todo


def test_enough_accelerators_are_ok():
    assert statuses(devices.judge(TWO, {}, num_required=2))["accelerators"] == "ok"
    assert statuses(devices.judge(Hardware(num_amd=4), {}, num_required=4))["accelerators"] == "ok"


def test_unresponsive_driver_problem_has_remedy():
    mismatch = Hardware(driver="580.65.06", error="Driver/library version mismatch")
    assert "Reboot" in the_problem(devices.judge(mismatch, {})).todo
    missing = Hardware(driver="580.65.06", error="NVML Shared Library Not Found")
    assert "NVIDIA runtime" in the_problem(devices.judge(missing, {})).todo
    assert "no device" in the_problem(devices.judge(Hardware(driver="580.65.06"), {})).what
