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
def test_missing_compiler_is_a_note_that_names_workarounds(changes, libraries_, name, words):
    assert {finding.status for finding in compilers.judge(ALL, libraries())} == {"ok"}
    assert "nvcc" not in by_name(compilers.judge(changed(nvcc=None), libraries(CPU)))
    found = by_name(compilers.judge(changed(**changes), libraries_))[name]
    assert found.status == "note"
    assert [word for word in words if word not in found.todo] == []


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
def test_compilers_of_this_machine_are_measured(monkeypatch):
    measured = compilers.measure()
    assert measured.cxx_version
    assert measured.headers_dir
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    measured = compilers.measure()
    assert (measured.cxx_version, measured.nvcc) == (None, None)
