import json

import pytest

from dstrial.doctor import libraries
from dstrial.doctor.devices import Hardware
from dstrial.doctor.libraries import Package, TorchBuild

TORCH = {
    "file": "/site/torch/__init__.py",
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "has_nccl": False,
    "architectures": [],
    "is_available": False,
    "num_devices": 0,
    "warnings": [],
    "has_gloo": True,
}
TRACE = """Timeout (0:00:03)!
Thread 0x00007f (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/site/torch/cuda/nccl.py", line 12 in <module>
"""


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_an_import_that_hangs_is_named_with_its_place():
    output = lines(
        {"begins": "torch"}, {"stage": "torch", "seconds": 2.0, "values": TORCH}, {"begins": "deepspeed"}
    )
    found = libraries.read_probe(output, TRACE, 1, 3.0)
    (failure,) = found.failures
    assert (failure.package, failure.place) == ("deepspeed", "/site/torch/cuda/nccl.py:12 in <module>")
    assert found.torch == TorchBuild("2.13.0", "/site/torch/__init__.py", has_nccl=False)


def test_a_process_that_had_to_be_killed_is_a_hanging_import():
    (failure,) = libraries.read_probe(lines({"begins": "torch"}), "", None, 3.0).failures
    assert failure.reason == "not imported within 3 s"


@pytest.mark.parametrize(("return_code", "said"), [(-4, "SIGILL"), (-11, "SIGSEGV"), (3, "status 3")])
def test_an_import_that_ends_the_process_says_how(return_code, said):
    (failure,) = libraries.read_probe(lines({"begins": "torch"}), "libfoo: bad\n", return_code, 3.0).failures
    assert said in failure.reason
    assert "libfoo: bad" in failure.reason


def test_one_cause_is_told_once():
    error = "ValueError: NPU_Accelerator requires torch_npu"
    output = lines(
        {"begins": "torch"},
        {"stage": "torch", "seconds": 2.0, "values": TORCH},
        {"begins": "deepspeed"},
        {"stage": "deepspeed", "seconds": 0.1, "error": error},
        {"begins": "dstrial"},
        {"stage": "dstrial", "seconds": 0.1, "error": error},
    )
    found = libraries.read_probe(output, "", 0, 3.0)
    assert [failure.package for failure in found.failures] == ["deepspeed"]
    (finding,) = [one for one in libraries.judge(found, {}, Hardware(), {}) if one.status == "problem"]
    assert "DS_ACCELERATOR" in finding.todo


def test_what_is_imported_and_what_is_installed_are_compared():
    found = libraries.Libraries(
        TorchBuild("2.9.0", "/home/ada/torch/__init__.py"),
        determined=Package("0.26.0", "/home/ada/determined/__init__.py"),
    )
    findings = libraries.judge(found, {"torch": "2.13.0", "determined": "0.38.1"}, Hardware(), {})
    problems = [one.name for one in findings if one.status == "problem"]
    assert problems == ["torch copies", "determined copies"]
    same = libraries.Libraries(TorchBuild("2.11.0+cu130"))
    assert {one.status for one in libraries.judge(same, {"torch": "2.11.0"}, Hardware(), {})} == {"ok"}


def test_an_accelerator_build_without_nccl_cannot_train_on_several_devices():
    for build, name in (
        (TorchBuild("2.11.0", cuda="13.0", has_nccl=False), "NCCL"),
        (TorchBuild("2.13.0", has_gloo=False), "gloo"),
    ):
        found = libraries.judge(libraries.Libraries(build), {}, Hardware(), {})
        assert [one.name for one in found if one.status == "problem"] == [name]
