"""torch's compiler stays out of processes that compile nothing, and is torch's own for those that do.

Every case is trained twice, with and without ``keep_compiler_out``, each time in a process that has trained nothing before, and
must come to the same bits.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_release import needs_0_19_8
from packaging.version import Version

from dstrial.engine.deepspeed_internals import compiler

PROGRAM = Path(__file__).with_name("compiler_program.py")
Trained = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def trained_twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """What trains a case in both ways, each as a fork of one new process that has imported torch and DeepSpeed."""
    scratch = tmp_path_factory.mktemp("compiler")
    log = scratch / "log"

    def trained(case: str, way: str) -> dict[str, Any]:
        file = scratch / f"{case}-{way}.json"
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{case} {way} {file}\n")
        program.stdin.flush()
        assert program.stdout.readline() == "0\n", log.read_text()[-4000:]
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def twice(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
        kept, usual = trained(case, "kept"), trained(case, "usual")
        if kept["comes_with_deepspeed"]:
            pytest.skip("this DeepSpeed loads torch's compiler when it is imported")
        return kept, usual

    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as program,
    ):
        try:
            yield twice
        finally:
            program.kill()


@pytest.mark.process
@needs_0_19_8  # the oldest loads the compiler when it is imported, and has no checkpoints on CPUs
@pytest.mark.parametrize("case", ["every_stage", "checkpointed"])
def test_training_without_the_compiler_comes_to_the_same_bits(trained_twice: Trained, case: str) -> None:
    kept, usual = trained_twice(case)
    assert kept["loaded"] == []
    with_networkx = (
        ["networkx"] if Version(torch.__version__) >= Version("2.13") else []
    )  # which the compiler of torch 2.6 leaves out
    assert usual["loaded"] == [*with_networkx, "torch._dynamo", "torch._inductor"]  # else this tests nothing
    assert kept["case"] == usual["case"]


@pytest.mark.process
def test_a_user_who_compiles_gets_the_same_graphs_and_bits(trained_twice: Trained) -> None:
    kept, usual = trained_twice("compiled_model")
    assert (kept["case"].pop("loaded before"), "torch._dynamo" in kept["loaded"]) == ([], True)
    assert usual["case"].pop("loaded before") != []
    assert kept["case"]["graphs"] == 2
    assert kept["case"] == usual["case"]


@pytest.mark.exhaustive(
    "tests/engine/test_compiler.py::test_a_user_who_compiles_gets_the_same_graphs_and_bits"
)
@pytest.mark.process
def test_an_engine_that_is_compiled_after_a_while_trains_the_same(trained_twice: Trained) -> None:
    kept, usual = trained_twice("compiled_engine")
    # ZeRO 3's hooks break the graph as DeepSpeed's own lazily disabled functions do, under another reason.
    assert kept["case"].pop("breaks")
    assert usual["case"].pop("breaks")
    assert kept["case"]["graphs"] > 0
    assert kept["case"] == usual["case"]


@pytest.mark.exhaustive(
    "tests/engine/test_compiler.py::test_what_is_compiled_when_called_is_compiled_once_and_as_the_user_asked"
)
@pytest.mark.process
def test_muon_is_compiled_at_its_first_call(trained_twice: Trained) -> None:
    kept, usual = trained_twice("muon")
    assert kept["case"]["graphs"] > 0
    assert kept["case"] == usual["case"]


@needs_0_19_8  # whose functions are switched off without loading the compiler
def test_every_function_that_is_passed_by_is_in_this_torch_and_deepspeed() -> None:
    found = {
        (module, owner): {
            function.__name__
            for function in compiler.switched_off(
                importlib.import_module(module)
                if owner is None
                else getattr(importlib.import_module(module), owner)
            )
        }
        for module, owner in compiler.SWITCHED_OFF
    }
    assert all(found.values()), found
    assert {"add_param_group", "zero_grad"} <= found["torch.optim.optimizer", "Optimizer"]


def test_every_step_that_loads_the_compiler_is_passed_by() -> None:
    loading = set()
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if inspect.isclass(optimizer) else None
        while inspect.isfunction(step):
            if "torch._dynamo" in step.__code__.co_names:
                loading.add(step)
            step = getattr(step, "__wrapped__", None)
    assert {"Adam.step", "SGD.step"} <= {step.__qualname__ for step in loading}
    assert set(compiler.optimizer_steps()) == loading


def test_names_of_deepspeed_that_are_replaced_are_there() -> None:
    module, owner, method = compiler.ZERO_3_HOOKS
    assert callable(getattr(getattr(importlib.import_module(module), owner), method))
    module, function = compiler.MUON_DECORATOR
    assert callable(getattr(importlib.import_module(module), function)())


def test_what_is_compiled_when_called_is_compiled_once_and_as_the_user_asked() -> None:
    compiled: list[object] = []

    def doubled(x: int) -> int:
        """Return two times x."""
        return 2 * x

    def compile_(function: Any) -> Any:
        compiled.append(function)
        return function

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "compile", compile_)
        call = compiler.compiled_when_called(doubled)
        assert (compiled, call.__name__, call.__doc__) == ([], "doubled", "Return two times x.")
        assert (call(2), call(x=3)) == (4, 6)
    assert compiled == [doubled]
