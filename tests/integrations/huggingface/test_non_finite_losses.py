"""A Trainer whose losses are NaN fails by the same settings as a trial, and keeps its last good checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_script

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("trainer_program.py")


def test_a_trainer_whose_losses_are_not_finite_fails_unless_it_is_asked_not_to(tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "fails": {"error": True},
        "unfiltered": {"error": True, "options": {"logging_nan_inf_filter": False}},
        "warns": {"data": {"dstrial": {"non_finite": "warn"}}},
        "sound": {"nan_after": None},
    }
    runs, directories = [], {}
    for name, more in asked.items():
        made = RunDirectory.create(
            tmp_path / "runs", name=name, context_dir=tmp_path, command=["test"], config={}
        )
        directories[name] = made
        options = {"save_strategy": "steps", "save_steps": 1, **more.pop("options", {})}
        runs.append(
            {
                "run_dir": str(made.path),
                "output": str(tmp_path / "output" / name),
                "nan_after": 2,
                "eval_steps": None,
                "options": options,
                **more,
            }
        )
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    run_script(PROGRAM, 1, str(path), deadline_s=280, env={"HF_HUB_OFFLINE": "1"})
    found = dict(zip(asked, json.loads(Path(f"{path}.0").read_text()), strict=True))

    for name in ("fails", "unfiltered"):
        error = found[name]["error"]
        assert error.startswith("NonFiniteError: training has no finite loss"), error
        assert "since batch 3: 3 reports in a row" in error
        assert [one.steps_completed for one in list_checkpoints(directories[name].checkpoints_path)] == [1, 2]
    assert found["warns"]["global_step"] == found["sound"]["global_step"] == 6
    assert any("no loss is finite" in text for text in found["fails"]["warnings"])
    assert not any("no loss is finite" in text for text in found["sound"]["warnings"])
