"""Whole dry runs in their own processes: results and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dstrial.engine.dryrun.process import DryRunError, _answer, dry_run, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace

pytestmark = pytest.mark.process

PROGRAMS = str(Path(__file__).parents[2] / "programs")
DEADLINE_S = 300.0

_FOUND: dict[str, ModelTrace] = {}


def request(
    kind: str = "plain", *, is_real: bool = False, module: str = "dry_run_models", paths: tuple[str, ...] = ()
) -> DryRunRequest:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},  # a dry run has stage 0
        "gradient_accumulation_steps": 4,
    }
    return DryRunRequest(
        workload="model_workload:ModelWorkload",
        options={
            "model": f"{module}:tower",
            "batch": f"{module}:records",
            "config": config,
            "shape": {"kind": kind, "width": 64},
        },
        world_size=8,
        module_paths=(*paths, PROGRAMS),
        is_real=is_real,
    )


def measured(asked: DryRunRequest) -> ModelTrace:
    """Return the result of a single dry run, cached for all tests."""
    key = json.dumps(asked.to_json(), sort_keys=True)
    if key not in _FOUND:
        _FOUND[key] = dry_run(asked, deadline_s=DEADLINE_S)
    return _FOUND[key]


def test_fake_tensors_predict_real_memory() -> None:
    fake, real = measured(request()), measured(request(is_real=True))
    num_parameters = 4 * (64 * 64 + 64)

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


def test_recomputation_counts_as_hardware_flops_only() -> None:
    import dry_run_models
    from torch.utils.flop_counter import FlopCounterMode

    plain, again = measured(request()), measured(request(kind="checkpoints"))

    assert again.flops.model == plain.flops.model == plain.flops.hardware
    assert again.flops.hardware.at(4) > 1.1 * again.flops.model.at(4)
    with FlopCounterMode(display=False) as counter:
        dry_run_models.tower()(*dry_run_models.records(4)).backward()
    assert plain.flops.model.at(4) == counter.get_total_flops()


def test_scalar_read_is_reported_with_line() -> None:
    result = measured(request(kind="reads"))

    assert [Path(place.rsplit(":", 1)[0]).name for place in result.bypasses] == ["dry_run_models.py"]


def test_parallel_dry_runs_fail_independently() -> None:
    asked = [request(), request(kind="raises"), request(kind="values")]

    apart, raised, unsupported = dry_runs(asked, deadline_s=200, num_parallel=2)

    assert isinstance(apart, ModelTrace)
    assert apart.memory == measured(request()).memory
    assert min(apart.pass_operations, apart.step_operations) > 0
    for failed in (raised, unsupported):
        assert isinstance(failed, DryRunError)
        # The error names the file and line of the failing user code.
        assert re.search(r"dry_run_models\.py:\d+", str(failed))


def test_dry_run_import_error_names_user_code(tmp_path: Path) -> None:
    (tmp_path / "broken_code.py").write_text("import a_module_that_is_not_there\n")

    (failed,) = dry_runs([request(module="broken_code", paths=(str(tmp_path),))], deadline_s=200)

    assert isinstance(failed, DryRunError)
    assert "a_module_that_is_not_there" in str(failed)
    assert str(tmp_path / "broken_code.py") + ":1" in str(failed)


def test_dry_run_past_deadline_raises() -> None:
    with pytest.raises(DryRunError, match=r"more than 0\.5 s"):
        dry_run(request(kind="sleeps"), deadline_s=0.5)


def test_dry_run_without_result_names_exit_code(tmp_path: Path) -> None:
    error = _answer(tmp_path / "answer-0.json", False, 1.0, -9, "")

    assert isinstance(error, DryRunError)
    assert "exit code -9" in str(error)
