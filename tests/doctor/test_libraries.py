import dataclasses
import json

import pytest

from dstrial.doctor import libraries
from dstrial.doctor.devices import Device, Hardware
from dstrial.doctor.libraries import Compilers, DeepSpeedBuild, Libraries, TorchBuild
from dstrial.master.backends.devices import Slot

TORCH = {"version": "2.13.0", "cuda": None, "hip": None, "num_devices": 0, "warnings": []}
BEGUN = {"begins": "torch"}, {"stage": "torch", "seconds": 2.0, "values": TORCH}, {"begins": "deepspeed"}
TRACE = """Timeout (0:00:03)!
Thread 0x00007f (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/site/torch/cuda/nccl.py", line 12 in <module>
"""
H200 = Device(0, "H200", 141 << 30, 0, capability=(9, 0))
NVIDIA = Hardware("550.54.15", (12, 4), devices=(H200,), visible=(Slot(0, "cuda", "H200", "GPU-a", "0"),))
HIDDEN = dataclasses.replace(NVIDIA, visible=())
AMD = Hardware(visible=(Slot(0, "rocm", "MI300", "0"),))
CPU = TorchBuild("2.13.0+cpu")
CUDA = TorchBuild("2.11.0+cu130", cuda="13.0", num_devices=1)


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("records", "errors", "return_code", "library", "said"),
    [
        (BEGUN, TRACE, 1, "deepspeed", "not imported within 3 s (it hangs at /site/torch/cuda/nccl.py:12 in"),
        (BEGUN[:1], "", None, "torch", "not imported within 3 s"),
        (BEGUN[:1], "libfoo: bad\n", -4, "torch", "by SIGILL, after saying 'libfoo: bad'"),
        (BEGUN[:1], "", 3, "torch", "with status 3"),
    ],
)
def test_probe_names_hanging_or_crashing_import(records, errors, return_code, library, said):
    found = libraries.read_probe(lines(*records), errors, return_code, 3.0)
    assert said in found.failures[library]
    assert (found.torch is not None) is (len(records) > 1)


def test_judge_reports_shared_import_error_once():
    error = "ValueError: NPU_Accelerator requires torch_npu"
    failing = [
        *({"stage": "deepspeed", "seconds": 0.1, "error": error}, {"begins": "dstrial"}),
        {"stage": "dstrial", "seconds": 0.1, "error": error},
    ]
    found = libraries.read_probe(lines(*BEGUN, *failing), "", 0, 3.0)
    (finding,) = [one for one in libraries.judge(found, Hardware(), {}) if one.status == "problem"]
    assert finding.name == "import deepspeed"
    assert "DS_ACCELERATOR" in finding.todo


def test_judge_cpu_accelerator_beside_gpu_is_problem():
    found = Libraries(CUDA, DeepSpeedBuild("0.19.8", "cpu"), seconds={"torch": 20.0})
    statuses = {one.name: one.status for one in libraries.judge(found, NVIDIA, {})}
    assert (statuses["accelerator"], statuses["imports"]) == ("problem", "note")
    chosen = libraries.judge(found, NVIDIA, {"DS_ACCELERATOR": "cpu"})
    assert "accelerator" not in {one.name for one in chosen}


@pytest.mark.parametrize(
    ("build", "hardware", "environ", "status", "said"),
    [
        (CUDA, NVIDIA, {}, "ok", "finds 1 device"),
        (CPU, Hardware(), {}, "ok", "no device is visible"),
        (CPU, NVIDIA, {"DS_ACCELERATOR": "cpu"}, "ok", "keeps training on the CPU"),
        (CPU, NVIDIA, {}, "problem", "a build of torch for CUDA 12.4 or older"),
        (CPU, AMD, {}, "problem", "a build of torch for ROCm"),
        (CUDA, AMD, {}, "problem", "a build of torch for ROCm"),
        (TorchBuild("2.11.0", hip="6.4", num_devices=8), AMD, {}, "ok", "finds 8 devices"),
        (TorchBuild("2.11.0", cuda="13.0"), HIDDEN, {}, "ok", "on the CPU"),
        (
            TorchBuild("2.11.0", cuda="13.0", warnings=("The NVIDIA driver on your system is too old",)),
            *(NVIDIA, {}, "problem"),
            "driver on your system is too old Install a build of torch for CUDA 12.4 or older",
        ),
    ],
)
def test_judge_build_compares_torch_with_devices(build, hardware, environ, status, said):
    (found,) = libraries.judge_build(build, hardware, environ)
    assert (found.name, found.status) == ("build", status)
    assert said in f"{found.what} {found.todo}"


def test_judge_build_device_without_kernels_is_problem():
    warned = TorchBuild("2.11.0", cuda="13.0", num_devices=1, warnings=("H200 with CUDA capability sm_90",))
    _, found = libraries.judge_build(warned, NVIDIA, {})
    assert (found.name, found.status) == ("kernels", "problem")
    assert "sm_90" in found.what


@pytest.mark.parametrize(
    ("missing", "said"), [("cxx", "g++"), ("ninja", "pip"), ("headers", "python3-dev"), ("nvcc", "CUDA_HOME")]
)
def test_missing_compiler_gives_note_with_workarounds(missing, said):
    there, known = Compilers("g++ 12.2", "1.11", "/usr/include", "13.0"), Libraries(CUDA)
    assert {one.status for one in libraries.judge_compilers(there, known)} == {"ok"}
    found = libraries.judge_compilers(dataclasses.replace(there, **{missing: None}), known)
    (found,) = [one for one in found if one.status != "ok"]
    assert found.status == "note"
    assert said in found.todo
    assert '"torch_adam": true' in found.todo


def test_nvcc_that_deepspeed_refuses_is_note():
    there = Compilers("g++ 12.2", "1.11", "/usr/include", "12.4")
    mismatch = DeepSpeedBuild("0.19.8", "cuda", "12.4 is not 13.0")
    *_, found = libraries.judge_compilers(there, Libraries(CUDA, mismatch))
    assert (found.name, found.status, "12.4 is not 13.0" in found.what) == ("nvcc", "note", True)
    assert "nvcc" not in {one.name for one in libraries.judge_compilers(there, Libraries(CPU))}


@pytest.mark.process
def test_compilers_of_this_machine_are_measured(monkeypatch):
    assert libraries.measure_compilers().cxx
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    measured = libraries.measure_compilers()
    assert (measured.cxx, measured.nvcc) == (None, None)
