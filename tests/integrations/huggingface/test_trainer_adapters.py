"""The Trainer with a PEFT LoRA model; checkpoints omit frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_runs import Runs

from dstrial.checkpoint.manifest import read_manifest

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

FROZEN: dict[str, Any] = {
    "stage": 2, "lora": None, "is_frozen": True, "data": {"dstrial": {"save_frozen_parameters": False}}
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("adapters"))

    def new(name: str, copy_of: str | None = None, **asked: Any) -> dict[str, Any]:
        """Return the settings of a run; it resumes if ``copy_of`` names another run."""
        if copy_of is not None:
            made.copied(name, copy_of)
            asked = {"resume": "latest", **asked}
        return made.settings(name, **{"lora": 5, "eval_steps": None, **asked})

    made.launch(
        2,
        new("whole 1", stage=1),
        new("paused 1", stage=1, pause_at=3),
        new("paused 3", stage=3, pause_at=3),
        new("frozen whole", **FROZEN),
        new("frozen paused", **FROZEN, pause_at=3),
    )
    another = made.of_another_trial("whole 1")
    made.launch(
        2,
        new("resumed 1", "paused 1", stage=1),
        new("resumed 3", "paused 3", stage=3),
        new("1 to 3", "paused 1", stage=3),
        new("other base", "paused 1", stage=1, lora=6, error=True),
        new("frozen resumed", "frozen paused", **FROZEN),
        new("warm", stage=3, resume=another),
        new("warm other base", stage=1, resume=another, lora=6, error=True),
    )
    made.launch(1, new("on one rank", "paused 3", stage=2, micro=4))
    return made


def test_trainer_lora_resumes_as_uninterrupted(runs: Runs) -> None:
    whole = runs.losses("whole 1")
    assert len(whole) == 6
    assert runs.losses("resumed 1") == whole
    for name in ("resumed 3", "1 to 3", "on one rank"):
        assert runs.losses(name) == pytest.approx(whole, abs=2e-4), name


def test_trainer_checkpoint_omits_frozen_parameters(runs: Runs) -> None:
    assert runs.losses("frozen resumed") == runs.losses("frozen whole")
    (layout,) = read_manifest(runs.checkpoint("frozen whole")).layouts
    frozen = [place["name"] for place in layout["parameters"] if not place["trainable"]]
    assert set(layout["frozen_checksums"]) <= set(frozen)
    assert len(layout["frozen_checksums"]) == len(frozen) - 1  # the output layer is the embedding


def test_trainer_lora_warm_start_loads_weights(runs: Runs) -> None:
    first, last = runs.losses("whole 1")[1], runs.losses("whole 1")[6]
    assert len(runs.losses("warm")) == 6
    assert abs(runs.losses("warm")[1] - first) > 1e-4  # the same records, with trained adapters
    assert last < first


def test_trainer_lora_with_different_base_is_rejected(runs: Runs) -> None:
    for name in ("other base", "warm other base"):
        error = runs.facts[name][0]["error"]
        assert "holds no frozen parameters, and" in error
        assert "Build the model from the same base weights" in error
