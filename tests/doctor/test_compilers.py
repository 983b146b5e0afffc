import dataclasses
import os
import time

import pytest

from dstrial.doctor import compilers
from dstrial.doctor.compilers import Compilers
from dstrial.doctor.libraries import Libraries, Package, TorchBuild
from dstrial.launch.stale_locks import find_stale_locks, remove_stale_locks

ALL = Compilers(
    "c++", "g++ 12.2", "1.11", False, True, "/usr/include/python3.12", "/usr/local/cuda/bin/nvcc", "13.0"
)
CUDA = TorchBuild("2.11.0", cuda="13.0", is_available=True)
CPU = TorchBuild("2.13.0+cpu")


def changed(**values):
    return dataclasses.replace(ALL, **values)


def libraries(torch=CUDA, **deepspeed):
    return Libraries(torch, Package("0.19.8", **deepspeed))


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_where_nothing_is_missing_all_is_ok():
    assert {finding.status for finding in compilers.judge(ALL, libraries())} == {"ok"}


def test_without_nvcc_the_operators_are_named_and_how_to_train_without_each():
    found = by_name(compilers.judge(changed(nvcc=None, nvcc_release=None), libraries()))["nvcc"]
    assert found.status == "note"
    for word in ("fused_adam", "cpu_adam", "torch_adam", "fused_lamb", "async_io", "CUDA_HOME", "13.0"):
        assert word in found.todo


def test_nvcc_is_no_matter_to_a_cpu_build():
    assert "nvcc" not in by_name(compilers.judge(changed(nvcc=None), libraries(CPU)))


def test_nvcc_of_another_cuda_release_is_told_as_deepspeed_tells_it():
    said = "Installed CUDA version 12.4 does not match the version torch was compiled with 13.0"
    found = by_name(compilers.judge(changed(nvcc_release="12.4"), libraries(cuda_mismatch=said)))["nvcc"]
    assert said in found.what
    assert "torch_adam" in found.todo


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ({"cxx_version": None}, "C++ compiler"),
        ({"ninja_version": None}, "ninja"),
        ({"has_python_headers": False}, "Python headers"),
    ],
)
def test_whatever_is_missing_for_compiling_says_how_to_train_without(missing, name):
    found = by_name(compilers.judge(changed(**missing), libraries(CPU)))[name]
    assert found.status == "note"
    assert '"torch_adam": true' in found.todo


def test_ninja_that_only_an_activated_environment_has_is_told_apart():
    found = by_name(compilers.judge(changed(ninja_version=None, ninja_beside_python=True), libraries()))[
        "ninja"
    ]
    assert "PATH" in found.todo


def test_operators_are_told_apart_by_what_becomes_of_them():
    operators = {
        "cpu_adam": "built",
        "fused_adam": "compiled",
        "fused_lamb": "compiled at first use",
        "fused_lion": "not possible",
        "evoformer_attn": "not possible",
    }
    found = by_name(compilers.judge_operators(libraries(operators=operators)))
    assert found["operators built"].what == "cpu_adam"
    assert found["operators compiled"].what == "fused_adam"
    assert found["operators compiled at first use"].what == "fused_lamb"
    assert found["operators not possible"].status == "note"
    assert "fused_lion" in found["operators not possible"].todo
    assert "evoformer" not in found["operators not possible"].todo


def test_operators_that_no_optimizer_needs_are_no_matter():
    for name in ("evoformer_attn", "async_io"):
        found = compilers.judge_operators(libraries(operators={name: "not possible"}))
        assert [one.status for one in found] == ["ok"]


@pytest.mark.process
def test_a_lock_of_a_killed_build_is_told_and_left_for_the_launcher(tmp_path, monkeypatch):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 600, time.time() - 600))
    held = tmp_path / "fused_adam" / "lock"
    held.parent.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with held.open("w"):
        os.utime(held, (time.time() - 600, time.time() - 600))
        measured = compilers.measure()
    assert measured.stale_locks == (str(lock),)
    assert by_name(compilers.judge(measured, libraries(CPU)))["stale locks"].status == "note"
    assert find_stale_locks(tmp_path / "cpu_adam" / "..") != []
    assert lock.exists()
    held.unlink()
    assert remove_stale_locks() == [lock]
    assert not lock.exists()


@pytest.mark.process
def test_compilers_of_this_machine_are_found():
    measured = compilers.measure()
    assert measured.cxx_version
    assert measured.headers_dir


@pytest.mark.process
def test_a_compiler_that_cannot_be_run_counts_as_missing(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    measured = compilers.measure()
    assert (measured.cxx_version, measured.nvcc) == (None, None)
