"""The launcher checks config and checkpoint for conflicts before ranks start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_layouts import PLAIN_LAYOUT

from dstrial.checkpoint.manifest import Manifest, read_saved_run, write_manifest
from dstrial.errors import CheckpointDamagedError
from dstrial.resume.locate import resumption_problems
from dstrial.resume.metadata import EngineRecord, run_metadata

LAYOUT = dataclasses.replace(
    PLAIN_LAYOUT, world_size=3, data_parallel_size=3, micro_batch_size=8, wrapper="DeepSpeedZeroOptimizer"
)
HYPERPARAMETERS = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": {"optimizer": {"type": "Adam"}}}


@pytest.fixture
def storage(tmp_path: Path) -> dict[str, Any]:
    checkpoint = tmp_path / "checkpoints" / "c1"
    checkpoint.mkdir(parents=True)
    layout = LAYOUT.to_json()
    write_manifest(checkpoint, Manifest.build(steps_completed=10, layouts=[layout], files={}))
    engine = EngineRecord.from_layout(layout, {"given": {"train_batch_size": 24, "optimizer": "Adam"}})
    (checkpoint / "metadata.json").write_text(json.dumps(run_metadata([engine], 7)))
    (tmp_path / "ds.json").write_text('{"train_batch_size": 24, "zero_optimization": {"stage": 1}}')
    return {"type": "directory", "container_path": str(tmp_path / "checkpoints")}


def problems(storage: dict[str, Any], num_slots: int, **changes: Any) -> list[str]:
    given = {"trial_id": 7, "latest_checkpoint": "c1", "hyperparameters": HYPERPARAMETERS, **changes}
    config = {"checkpoint_storage": storage, "data": given.get("data")}
    info = SimpleNamespace(
        latest_checkpoint=given["latest_checkpoint"],
        container_slot_counts=[num_slots],
        trial=SimpleNamespace(_config=config, hparams=given["hyperparameters"], trial_id=given["trial_id"]),
    )
    return [str(problem) for problem in resumption_problems(info, Path(storage["container_path"]).parent)]


def test_resume_check_accepts_divisible_batch(storage: dict[str, Any]) -> None:
    assert problems(storage, 2) == []
    assert problems(storage, 3) == []


def test_resume_check_reports_incompatible_config(storage: dict[str, Any]) -> None:
    (undivided,) = problems(storage, 5)
    assert "which 5 data-parallel replicas cannot share evenly" in undivided
    overwrite = {"train_batch_size": 32, "optimizer": {"type": "Lion"}}
    hyperparameters = {**HYPERPARAMETERS, "overwrite_deepspeed_args": overwrite}
    batch, optimizer = problems(storage, 2, hyperparameters=hyperparameters)
    assert "train_batch_size is 32; expected 24" in batch
    assert "optimizer.type is 'Lion'; expected 'Adam'" in optimizer
    (model,) = problems(storage, 2, data={"dstrial": {"model_parallel_size": 2}})
    assert "data.dstrial.model_parallel_size is 2; expected 1" in model


def test_resume_check_skips_checkpoint_of_another_trial(storage: dict[str, Any]) -> None:
    assert problems(storage, 5, trial_id=8) == []


def test_resume_check_skips_unreachable_checkpoint(storage: dict[str, Any]) -> None:
    assert problems(storage, 5, latest_checkpoint="c2") == []
    assert problems(storage, 5, latest_checkpoint=None) == []
    assert problems({**storage, "type": "s3"}, 5) == []


def test_resume_check_reads_checkpoint_from_environment(
    storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoints" / "c1"
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    (checkpoint / "metadata.json").write_text(json.dumps({**metadata, "trial_id": 0}))
    monkeypatch.setenv("DSTRIAL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("DSTRIAL_RESUME", str(checkpoint))
    assert len(problems(storage, 5, latest_checkpoint=None)) == 1


def test_saved_run_prefers_manifest_layout_over_metadata(storage: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "c1"
    layout = dataclasses.replace(LAYOUT, world_size=2, data_parallel_size=2, micro_batch_size=4).to_json()
    write_manifest(checkpoint, Manifest.build(steps_completed=10, layouts=[layout], files={}))
    saved = read_saved_run(checkpoint)
    (engine,) = saved.engines
    assert (saved.trial_id, engine.world_size, engine.given["train_batch_size"]) == (7, 2, 24)
    assert (engine.micro_batch_size, engine.micro_batch_limit) == (4, 8)
    (checkpoint / "metadata.json").write_text("{")
    with pytest.raises(CheckpointDamagedError, match=r"metadata\.json is no JSON"):
        read_saved_run(checkpoint)
