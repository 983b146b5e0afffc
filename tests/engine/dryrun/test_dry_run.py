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
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult

pytestmark = pytest.mark.process

PROGRAMS = str(Path(__file__).parents[2] / "programs")
DEADLINE_S = 60.0
NUM_PARAMETERS = 4 * (64 * 64 + 64)


_FOUND: dict[str, DryRunResult] = {}


def request(stage: int = 0, world_size: int = 8, kind: str = "plain", **more: Any) -> DryRunRequest:
    zero = {"stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
    zero["stage3_param_persistence_threshold"] = 0
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {**zero, **more.pop("zero", {})},
        "gradient_accumulation_steps": more.pop("accumulation", 1),
    }
    return DryRunRequest(
        workload="model_workload:ModelWorkload",
        shared_options={"model": "dry_run_models:tower", "batch": "dry_run_models:records"},
        options={"shape": {"kind": kind, "width": 64}},
        deepspeed_config=config,
        world_size=world_size,
        module_paths=(PROGRAMS,),
        **more,
    )


def measured(asked: DryRunRequest) -> DryRunResult:
    """Return what one dry run by itself finds, which several tests compare with others."""
    key = json.dumps(asked.to_json(), sort_keys=True)
    if key not in _FOUND:
        _FOUND[key] = dry_run(asked, deadline_s=DEADLINE_S)
    return _FOUND[key]


@pytest.mark.exhaustive("[0-1]", "[2-4]", "[3-4]")
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_fake_tensors_take_the_bytes_of_real_ones(stage: int, accumulation: int) -> None:
    fake = measured(request(stage, accumulation=accumulation))
    real = measured(request(stage, accumulation=accumulation, is_real=True))

    assert fake.is_linear
    assert fake.is_fake
    assert not real.is_fake
    assert (fake.inner_operations > 0) == (accumulation > 1)
    for size in (2, 4, 64):
        assert fake.device.peak(size) == pytest.approx(real.device.peak(size), rel=0.002)
    # With real tensors ZeRO 3 also compares lists between ranks.
    assert set(fake.last_collectives) <= set(real.last_collectives)
    assert fake.flops == real.flops


def test_state_is_divided_as_each_stage_divides_it() -> None:
    per_parameter = [measured(request(stage)).device.settled / NUM_PARAMETERS for stage in (0, 1, 3)]

    # bf16 weights are 2 bytes; the float32 weights and Adam's two moments 12.
    assert per_parameter[0] == pytest.approx(14, rel=0.02)
    assert per_parameter[1] == pytest.approx(2 + 12 / 8, rel=0.05)
    # Everything is divided, gradients included, but for the one bucket.
    assert per_parameter[2] == pytest.approx((2 + 2 + 12) / 8 + 2 * 20_000 / NUM_PARAMETERS, rel=0.05)


def test_what_is_offloaded_is_on_the_host() -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    kept = measured(request(2, target="cuda"))
    offloaded = measured(request(2, target="cuda", zero=zero))

    assert kept.host.settled < 0.01 * NUM_PARAMETERS
    assert offloaded.device.settled < kept.device.settled - 4 / 8 * NUM_PARAMETERS
    assert offloaded.host.settled >= 12 / 8 * NUM_PARAMETERS


def test_gradients_are_sent_once_and_parameters_gathered_once() -> None:
    result = measured(request(1))

    sent = {(each.kind, each.phase): each.num_bytes for each in result.last_collectives}
    assert sent["all_reduce", "reduce"] == pytest.approx(2 * NUM_PARAMETERS, rel=0.01)
    assert sent["all_gather", "gather"] == pytest.approx(2 * NUM_PARAMETERS, rel=0.01)
    assert all(each.group_size == 8 for each in result.last_collectives)


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
    asked = [request(3), request(kind="raises"), request(kind="values")]

    apart, raised, unsupported = dry_runs(asked, deadline_s=200, num_parallel=2)

    assert isinstance(apart, DryRunResult)
    assert apart.device == measured(request(3)).device
    assert apart.last_operations > 0
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
        dataclasses.replace(request(stage), shared_options=options, module_paths=paths) for stage in (0, 3)
    ]

    found = dry_runs(asked, deadline_s=200, num_parallel=2)

    assert (tmp_path / "imports").read_text() == "imported\n" * num_imports
    for one, stage in zip(found, (0, 3), strict=True):
        assert isinstance(one, DryRunResult), one
        assert one.device == measured(request(stage)).device


def test_code_that_cannot_be_imported_is_the_error_of_each_request(tmp_path: Path) -> None:
    (tmp_path / "broken_code.py").write_text("import a_module_that_is_not_there\n")
    options = {"model": "broken_code:tower", "batch": "broken_code:records"}
    asked = [
        dataclasses.replace(request(stage), shared_options=options, module_paths=(str(tmp_path), PROGRAMS))
        for stage in (0, 3)
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
