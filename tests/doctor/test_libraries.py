import json

import pytest

from dstrial.doctor import imports, libraries
from dstrial.doctor.devices import Hardware
from dstrial.doctor.libraries import TorchBuild

TORCH = {
    "file": "/site/torch/__init__.py",
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "nccl": None,
    "architectures": [],
    "is_available": False,
    "num_devices": 0,
    "warnings": [],
    "has_gloo": True,
    "num_threads": 2,
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
    assert (failure.library, failure.place) == ("deepspeed", "/site/torch/cuda/nccl.py:12 in <module>")
    assert found.torch == TorchBuild("2.13.0", "/site/torch/__init__.py", is_available=False, has_gloo=True)


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
    assert [failure.library for failure in found.failures] == ["deepspeed"]
    (finding,) = [one for one in imports.judge(found, {}, Hardware(), {}) if one.status == "problem"]
    assert "DS_ACCELERATOR" in finding.todo


def test_files_are_read_without_running_them(tmp_path):
    module = tmp_path / "version.py"
    module.write_text("raise SystemExit\n__version__ = '2.6.0'\ncuda: str = '12.4'\nhip = None\nx = f()\n")
    assert libraries.assignments(module) == {"__version__": "2.6.0", "cuda": "12.4", "hip": None}
    assert libraries.assignments(tmp_path / "missing.py") == {}


def test_what_is_imported_and_what_is_installed_are_compared():
    found = libraries.Libraries(TorchBuild("2.9.0", "/home/ada/torch/__init__.py"), None, is_imported=True)
    findings = imports.judge(found, {"torch": "2.13.0"}, Hardware(), {})
    assert [one.name for one in findings if one.status == "problem"] == ["torch copies"]
    same = imports.judge(
        libraries.Libraries(TorchBuild("2.11.0+cu130"), None, is_imported=True),
        {"torch": "2.11.0"},
        Hardware(),
        {},
    )
    assert {one.status for one in same} == {"ok"}


def test_an_accelerator_build_without_nccl_cannot_train_on_several_devices():
    (found,) = imports.judge_backends(TorchBuild("2.11.0", cuda="13.0"), is_imported=True)
    assert (found.name, found.status) == ("NCCL", "problem")
    (found,) = imports.judge_backends(TorchBuild("2.13.0", has_gloo=False), is_imported=True)
    assert (found.name, found.status) == ("gloo", "problem")


def test_the_files_of_this_environment_say_what_it_has():
    read = libraries.read_files()
    assert read.torch.version.startswith("2.")
    assert read.deepspeed.version == libraries.installed_version("deepspeed")
    assert read.failures == ()
