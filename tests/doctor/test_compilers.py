import dataclasses

import pytest

from dstrial.doctor import compilers
from dstrial.doctor.compilers import Compilers
from dstrial.doctor.libraries import DeepSpeedBuild, Libraries, TorchBuild

ALL = Compilers(
    "c++", "g++ 12.2", "1.11", False, True, "/usr/include/python3.12", "/usr/local/cuda/bin/nvcc", "13.0"
)
CUDA = TorchBuild("2.11.0", cuda="13.0")
CPU = TorchBuild("2.13.0+cpu")


def changed(**values):
    return dataclasses.replace(ALL, **values)


def libraries(torch=CUDA, **deepspeed):
    return Libraries(torch, DeepSpeedBuild("0.19.8", "cuda", **deepspeed))


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("changes", "libraries_", "name", "words"),
    [
        (
            {"nvcc": None, "nvcc_release": None},
            *(libraries(), "nvcc"),
            ("fused_adam", "cpu_adam", "torch_adam", "fused_lamb", "async_io", "CUDA_HOME", "13.0"),
        ),
        ({"nvcc_release": "12.4"}, libraries(cuda_mismatch="12.4 is not 13.0"), "nvcc", ("torch_adam",)),
        ({"cxx_version": None}, libraries(CPU), "C++ compiler", ('"torch_adam": true',)),
        ({"ninja_version": None}, libraries(CPU), "ninja", ('"torch_adam": true',)),
        ({"has_python_headers": False}, libraries(CPU), "Python headers", ('"torch_adam": true',)),
        ({"ninja_version": None, "ninja_beside_python": True}, libraries(), "ninja", ("PATH",)),
    ],
)
def test_missing_compiler_gives_note_with_workarounds(changes, libraries_, name, words):
    assert {finding.status for finding in compilers.judge(ALL, libraries())} == {"ok"}
    assert "nvcc" not in by_name(compilers.judge(changed(nvcc=None), libraries(CPU)))
    found = by_name(compilers.judge(changed(**changes), libraries_))[name]
    assert found.status == "note"
    assert [word for word in words if word not in found.todo] == []


@pytest.mark.process
def test_compilers_of_this_machine_are_measured(monkeypatch):
    measured = compilers.measure()
    assert measured.cxx_version
    assert measured.headers_dir
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    measured = compilers.measure()
    assert (measured.cxx_version, measured.nvcc) == (None, None)
