import dataclasses
from types import SimpleNamespace

import pytest

from dstrial.doctor import devices
from dstrial.doctor.devices import Device, Hardware
from dstrial.master.backends.devices import Slot

GIB = 1 << 30
FIRST = Device(0, "H200", 141 * GIB, 0)
TWO = Hardware(
    driver="580.65.06",
    driver_cuda=(13, 0),
    devices=(FIRST, dataclasses.replace(FIRST, idx=1)),
    visible=(Slot(0, "cuda", "H200", "GPU-a", "0"), Slot(1, "cuda", "H200", "GPU-b", "1")),
)
HIDDEN = dataclasses.replace(TWO, visible=())


def by_name(found):
    return {finding.name: finding for finding in found}


@pytest.mark.parametrize(("used_gib", "status"), [(0.6, "ok"), (20, "note"), (135, "problem")])
def test_device_in_use_is_reported(used_gib, status):
    found = devices.judge_device(dataclasses.replace(FIRST, used_bytes=int(used_gib * GIB)))
    assert found.status == status
    assert f"{141 - used_gib:.0f} GiB free" in found.what


@pytest.mark.parametrize(
    ("hardware", "environ", "required", "mends"),
    [
        (Hardware(), {}, 1, "driver"),
        (HIDDEN, {"CUDA_VISIBLE_DEVICES": ""}, 1, "Unset CUDA_VISIBLE_DEVICES"),
        (HIDDEN, {"DS_ACCELERATOR": "cpu"}, 1, "Unset DS_ACCELERATOR"),
        (TWO, {}, 3, "ask for fewer"),
    ],
)
def test_missing_required_accelerator_names_cause(hardware, environ, required, mends):
    found = by_name(devices.judge(hardware, environ, num_required=required))["accelerators"]
    assert found.status == "problem"
    assert mends in found.todo


def test_visible_devices_are_ok_hidden_are_note():
    assert by_name(devices.judge(TWO, {}, num_required=2))["accelerators"].status == "ok"
    seen = by_name(devices.judge(TWO, {"CUDA_VISIBLE_DEVICES": "0,1"}))["CUDA_VISIBLE_DEVICES"]
    hidden = by_name(devices.judge(HIDDEN, {"CUDA_VISIBLE_DEVICES": "7"}))["CUDA_VISIBLE_DEVICES"]
    assert (seen.status, hidden.status) == ("ok", "note")


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (Hardware(driver="580.65.06", error="Driver/library version mismatch"), "Reboot"),
        (Hardware(driver="580.65.06", error="NVML Shared Library Not Found"), "NVIDIA runtime"),
        (Hardware(driver="580.65.06"), "pass the devices in"),
    ],
)
def test_unresponsive_driver_problem_has_remedy(hardware, said):
    (found,) = devices.judge(hardware, {})
    assert found.status == "problem"
    assert said in found.todo


def test_driver_that_reports_little_is_queried():
    """Old drivers do not support every call."""

    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError("not supported")

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda idx: idx,
        nvmlDeviceGetName=lambda _: b"H200",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=141 * GIB, used=GIB),
        nvmlDeviceGetCudaComputeCapability=refuse,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 11040,
        nvmlSystemGetDriverVersion=refuse,
    )
    found = devices._query(nvml)
    assert found == Hardware("there", (11, 4), devices=(Device(0, "H200", 141 * GIB, GIB),))
