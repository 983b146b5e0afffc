"""The Trainer with a PEFT LoRA model; checkpoints omit frozen weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dstrial.checkpoint.manifest import read_manifest
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_script

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("trainer_program.py")


FROZEN: dict[str, Any] = {
    "stage": 2, "lora": None, "is_frozen": True, "data": {"dstrial": {"save_frozen_parameters": False}}
}  # fmt: skip


class AdapterRuns:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dirs: dict[str, Path] = {}
        self.errors: dict[str, str] = {}

    def settings(self, name: str, copy_of: str | None = None, **asked: Any) -> tuple[str, dict[str, Any]]:
        if copy_of is None:
            made = RunDirectory.create(
                self.directory / "runs", name=name, context_dir=self.directory, command=["test"], config={}
            )
            self.run_dirs[name] = made.path
        else:
            self.run_dirs[name] = self.directory / "runs" / name
            shutil.copytree(self.run_dirs[copy_of], self.run_dirs[name])
        output = str(self.directory / "output" / name)
        return name, {
            "run_dir": str(self.run_dirs[name]), "output": output, "lora": 5, "eval_steps": None,
            "resume": "latest" if copy_of else None, **asked,
        }  # fmt: skip

    def launch(self, num_ranks: int, *runs: tuple[str, dict[str, Any]]) -> None:
        path = self.directory / f"{num_ranks}-{runs[0][0]}.json"
        path.write_text(json.dumps([asked for _, asked in runs]))
        run_script(PROGRAM, num_ranks, str(path), deadline_s=400, env={"HF_HUB_OFFLINE": "1"})
        facts = json.loads(path.with_name(f"{path.name}.0").read_text())
        self.errors |= {name: one.get("error", "") for (name, _), one in zip(runs, facts, strict=True)}

    def losses(self, name: str) -> dict[int, float]:
        rows = map(json.loads, (self.run_dirs[name] / "metrics.jsonl").read_text().splitlines())
        return {row["steps_completed"]: row["metrics"]["loss"] for row in rows if row["group"] == "training"}

    def checkpoint(self, name: str) -> Path:
        newest = newest_checkpoint(self.run_dirs[name] / "checkpoints")
        assert newest is not None
        return newest.path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> AdapterRuns:
    made = AdapterRuns(tmp_path_factory.mktemp("adapters"))
    made.launch(
        2,
        made.settings("whole 1", stage=1),
        made.settings("paused 1", stage=1, pause_at=3),
        made.settings("paused 3", stage=3, pause_at=3),
        made.settings("frozen whole", **FROZEN),
        made.settings("frozen paused", **FROZEN, pause_at=3),
    )
    another = made.directory / "another trial's"
    shutil.copytree(made.checkpoint("whole 1"), another)
    metadata = json.loads((another / "metadata.json").read_text())
    (another / "metadata.json").write_text(json.dumps({**metadata, "trial_id": metadata["trial_id"] + 1}))
    made.launch(
        2,
        made.settings("resumed 1", "paused 1", stage=1),
        made.settings("resumed 3", "paused 3", stage=3),
        made.settings("1 to 3", "paused 1", stage=3),
        made.settings("other base", "paused 1", stage=1, lora=6, error=True),
        made.settings("frozen resumed", "frozen paused", **FROZEN),
        made.settings("warm", stage=3, resume=str(another)),
        made.settings("warm other base", stage=1, resume=str(another), lora=6, error=True),
    )
    made.launch(1, made.settings("on one rank", "paused 3", stage=2, micro=4))
    return made


def test_trainer_lora_resumes_as_uninterrupted(runs: AdapterRuns) -> None:
    whole = runs.losses("whole 1")
    assert len(whole) == 6
    assert runs.losses("resumed 1") == whole
    for name in ("resumed 3", "1 to 3", "on one rank"):
        assert runs.losses(name) == pytest.approx(whole, abs=2e-4), name


def test_trainer_checkpoint_omits_frozen_parameters(runs: AdapterRuns) -> None:
    assert runs.losses("frozen resumed") == runs.losses("frozen whole")
    (layout,) = read_manifest(runs.checkpoint("frozen whole")).layouts
    frozen = [place["name"] for place in layout["parameters"] if not place["trainable"]]
    assert set(layout["frozen_checksums"]) <= set(frozen)
    assert len(layout["frozen_checksums"]) == len(frozen) - 1  # the output layer is the embedding


def test_trainer_lora_warm_start_loads_weights(runs: AdapterRuns) -> None:
    first, last = runs.losses("whole 1")[1], runs.losses("whole 1")[6]
    assert len(runs.losses("warm")) == 6
    assert abs(runs.losses("warm")[1] - first) > 1e-4  # the same records, with trained adapters
    assert last < first


def test_trainer_lora_with_different_base_is_rejected(runs: AdapterRuns) -> None:
    for name in ("other base", "warm other base"):
        assert "holds no frozen parameters, and" in runs.errors[name]
        assert "Build the model from the same base weights" in runs.errors[name]
