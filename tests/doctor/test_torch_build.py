import pytest

from dstrial.doctor import torch_build
from dstrial.doctor.devices import Device, Hardware
from dstrial.doctor.libraries import TorchBuild

GIB = 1 << 30
H200 = Device(0, "H200", "GPU-a", 141 * GIB, 0, capability=(9, 0))
CUDA13 = TorchBuild("2.11.0+cu130", cuda="13.0", is_available=True, num_devices=1)
CPU = TorchBuild("2.13.0+cpu", is_available=False)


def hardware(driver="580.65.06", cuda=(13, 0), *devices, num_amd=0):
    return Hardware(driver=driver, driver_cuda=cuda, devices=devices or (H200,), num_amd=num_amd)


def judged(build, there, *, environ=None):
    return torch_build.judge(build, there, environ or {})


def the_problem(findings):
    (found,) = [finding for finding in findings if finding.status == "problem"]
    return found


@pytest.mark.parametrize(
    ("driver", "serves", "build", "instead"),
    [
        ("470.256.02", (11, 4), "13.0", "CUDA 11.8 (torch 2.6 or 2.7)"),
        ("470.256.02", (11, 4), "12.6", "CUDA 11.8 (torch 2.6 or 2.7)"),
        ("550.54.15", (12, 4), "13.0", "CUDA 12.6"),
        ("550.54.15", None, "13.0", "CUDA 12.6"),  # NVML of this driver does not say what it serves
        ("470.256.02", None, "12.8", "CUDA 11.8 (torch 2.6 or 2.7)"),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_a_problem_that_says_what_to_install(
    driver, serves, build, instead
):
    old = TorchBuild("2.11.0", cuda=build, is_available=False, warnings=("The NVIDIA driver is too old",))
    found = the_problem(judged(old, hardware(driver, serves)))
    assert driver in found.what
    assert build in found.what
    assert instead in found.todo
    assert ("580.65" if build.startswith("13") else "525.60") in found.todo


def test_a_driver_below_all_builds_leaves_only_a_newer_driver():
    found = the_problem(
        judged(TorchBuild("2.6.0", cuda="11.8", is_available=False), hardware("390.157", (9, 1)))
    )
    assert found.todo == "Install driver 450.80 or newer."


@pytest.mark.parametrize(
    ("driver", "serves", "build"),
    [
        ("580.65.06", (13, 0), "13.2"),
        ("525.60.13", (12, 0), "12.9"),
        ("590.10", (13, 1), "11.8"),
        ("580.65.06", None, "13.0"),
    ],
)
def test_every_release_of_a_cuda_major_runs_on_the_oldest_driver_of_it(driver, serves, build):
    new_enough = TorchBuild("2.11.0", cuda=build, is_available=True, num_devices=1)
    assert [finding.status for finding in judged(new_enough, hardware(driver, serves))] == ["ok"]


def test_a_compatibility_package_makes_an_older_driver_do():
    assert judged(CUDA13, hardware("535.161", (12, 2)))[0].status == "ok"


def test_a_cpu_build_on_a_machine_with_devices_is_a_problem_unless_it_is_meant():
    found = the_problem(judged(CPU, hardware()))
    assert "CPU only" in found.what
    assert "CUDA 13" in found.todo
    assert judged(CPU, hardware(), environ={"DS_ACCELERATOR": "cpu"})[0].status == "ok"
    assert judged(CPU, Hardware())[0].status == "ok"


def test_a_cuda_build_without_any_driver_is_only_a_note():
    assert judged(TorchBuild("2.11.0", cuda="13.0", is_available=False), Hardware())[0].status == "note"


def test_amd_devices_need_a_rocm_build_and_nvidia_devices_none():
    amd = Hardware(num_amd=8)
    assert "ROCm" in the_problem(judged(CUDA13, amd)).todo
    assert "ROCm" in the_problem(judged(CPU, amd)).todo
    rocm = TorchBuild("2.11.0", hip="6.4", is_available=True, num_devices=8)
    assert judged(rocm, amd)[0].status == "ok"
    assert "NVIDIA" in the_problem(judged(rocm, hardware())).what


def test_torch_that_finds_no_visible_device_is_a_problem_with_what_it_said():
    blind = TorchBuild(
        "2.11.0", cuda="13.0", is_available=False, warnings=("CUDA initialization: error 802",)
    )
    assert "error 802" in the_problem(judged(blind, hardware())).what
    hidden = judged(blind, hardware(), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert [finding.status for finding in hidden] == ["ok"]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80", "sm_90"), (9, 0), True),
        (("sm_80",), (8, 6), True),  # machine code runs on higher minor numbers
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),  # and on no other major
        (("sm_80", "compute_80"), (12, 0), True),  # the intermediate language is translated
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("nonsense",), (9, 0), False),
    ],
)
def test_a_build_runs_where_it_has_kernels(architectures, capability, runs):
    assert torch_build.has_kernels(architectures, capability) is runs


def test_a_device_without_kernels_is_a_problem_that_names_both():
    build = TorchBuild(
        "2.11.0", cuda="13.0", is_available=True, num_devices=1, architectures=("sm_75", "sm_80")
    )
    found = the_problem(judged(build, hardware()))
    assert "9.0" in found.what
    assert "sm_75, sm_80" in found.what
