"""Whole dry runs, in processes of their own: what they find, and what they say when they cannot."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrial.engine.dryrun.process import DryRunError, dry_run, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace

pytestmark = pytest.mark.process

PROGRAMS = str(Path(__file__).parents[2] / "programs")
DEADLINE_S = 60.0

_FOUND: dict[str, ModelTrace] = {}


def request(kind: str = "plain", **more: Any) -> DryRunRequest:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},  # a dry run has stage 0
        "gradient_accumulation_steps": 4,
    }
    return DryRunRequest(
        workload="model_workload:ModelWorkload",
        shared_options={"model": "dry_run_models:tower", "batch": "dry_run_models:records"},
        options={"shape": {"kind": kind, "width": 64}},
        deepspeed_config=config,
        world_size=8,
        module_paths=(PROGRAMS,),
        **more,
    )


def measured(asked: DryRunRequest) -> ModelTrace:
    """Return what one dry run by itself finds, which several tests compare with others."""
    key = json.dumps(asked.to_json(), sort_keys=True)
    if key not in _FOUND:
        _FOUND[key] = dry_run(asked, deadline_s=DEADLINE_S)
    return _FOUND[key]


def test_fake_tensors_take_the_bytes_of_real_ones() -> None:
    fake, real = measured(request()), measured(request(is_real=True))
    num_parameters = 4 * (64 * 64 + 64)

    assert fake.is_linear
    assert (fake.is_fake, real.is_fake) == (True, False)
    for size in (2, 4, 64):
        for phase in ("forward", "backward"):
            assert fake.memory.in_phase(phase, size) == pytest.approx(
                real.memory.in_phase(phase, size), rel=0.002
            )
    assert fake.flops == real.flops
    assert (fake.parameters, fake.num_tensors, fake.largest_tensor) == (num_parameters, 8, 64 * 64)
    # bf16 weights are 2 bytes; the float32 weights and Adam's two moments 12. Gradients are not counted.
    assert fake.memory.settled == pytest.approx(14 * num_parameters, rel=0.02)
    assert fake.state_bytes["parameters"] == 2 * num_parameters
    assert fake.state_bytes["optimizer"] == pytest.approx(12 * num_parameters, rel=0.01)
    assert fake.memory.in_phase("backward", 2) < 15 * num_parameters


def test_recomputation_counts_for_the_hardware_only() -> None:
    import dry_run_models
    from torch.utils.flop_counter import FlopCounterMode

    plain, again = measured(request()), measured(request(kind="checkpoints"))

    assert again.flops.model == plain.flops.model == plain.flops.hardware
    assert again.flops.hardware.at(4) > 1.1 * again.flops.model.at(4)
    with FlopCounterMode(display=False) as counter:
        dry_run_models.tower()(*dry_run_models.records(4)).backward()
    assert plain.flops.model.at(4) == counter.get_total_flops()


def test_reading_a_scalar_is_told_with_its_line() -> None:
    result = measured(request(kind="reads"))

    assert [Path(each.place.rsplit(":", 1)[0]).name for each in result.bypasses] == ["dry_run_models.py"]


def test_dry_runs_in_forks_of_one_interpreter_find_the_same_and_fail_alone() -> None:
    asked = [request(), request(kind="raises"), request(kind="values")]

    apart, raised, unsupported = dry_runs(asked, deadline_s=200, num_parallel=2)

    assert isinstance(apart, ModelTrace)
    assert apart.memory == measured(request()).memory
    assert apart.pass_operations > apart.step_operations > 0
    for failed, kind in ((raised, "error"), (unsupported, "unsupported")):
        assert isinstance(failed, DryRunError)
        assert failed.kind == kind
        # Code that does not run is named by its line.
        assert re.search(r"dry_run_models\.py:\d+", str(failed))


@pytest.mark.parametrize(
    ("more", "num_imports"),
    [
        ("", 1),
        # What a fork does not have, or would share with the others, each has by itself.
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", 3),
        ("FILE = open(__file__)", 3),
    ],
    ids=["nothing else", "a thread", "an open file"],
)
def test_code_is_imported_once_for_requests_that_begin_alike(
    more: str, num_imports: int, tmp_path: Path
) -> None:
    code = f"{more}\nwith open({str(tmp_path / 'imports')!r}, 'a') as imports:\n    imports.write('imported\\n')\n"
    (tmp_path / "counted.py").write_text(f"from dry_run_models import *\n{code}")
    options = {"model": "counted:tower", "batch": "counted:records"}
    paths = (str(tmp_path), PROGRAMS)
    asked = [
        dataclasses.replace(request(kind), shared_options=options, module_paths=paths)
        for kind in ("plain", "checkpoints")
    ]

    found = dry_runs(asked, deadline_s=200, num_parallel=2)

    assert (tmp_path / "imports").read_text() == "imported\n" * num_imports
    for one, kind in zip(found, ("plain", "checkpoints"), strict=True):
        assert isinstance(one, ModelTrace), one
        assert one.memory == measured(request(kind)).memory


def test_code_that_cannot_be_imported_is_the_error_of_each_request(tmp_path: Path) -> None:
    (tmp_path / "broken_code.py").write_text("import a_module_that_is_not_there\n")
    options = {"model": "broken_code:tower", "batch": "broken_code:records"}
    asked = [
        dataclasses.replace(request(kind), shared_options=options, module_paths=(str(tmp_path), PROGRAMS))
        for kind in ("plain", "checkpoints")
    ]

    for failed in dry_runs(asked, deadline_s=200, num_parallel=2):
        assert isinstance(failed, DryRunError)
        assert "a_module_that_is_not_there" in str(failed)
        assert str(tmp_path / "broken_code.py") + ":1" in str(failed)


def test_a_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(DryRunError, match=r"more than 0\.5 s") as caught:
        dry_run(request(kind="sleeps"), deadline_s=0.5)

    assert caught.value.kind == "deadline"


def test_whoever_asks_for_a_dry_run_needs_no_torch() -> None:
    program = "import sys, dstrial.engine.dryrun.process, dstrial.dsat.predictor.models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
