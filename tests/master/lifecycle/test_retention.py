"""Checkpoints that the retention policy keeps after an experiment ends."""

from __future__ import annotations

from typing import Any

import pytest
from submitting import checkpoints_of, config, submit, wait_until
from waiting import wait_for

from dstrial.errors import DstrialError
from dstrial.master.store.views.observe import num_pending_jobs
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

# Saves checkpoints at batches 1 to 4; reports the scores of the hyperparameters at batches 1 to 3.
SAVE = """
import determined as det
scores = det.get_cluster_info().trial.hparams["scores"]
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step, score in enumerate([*scores, None], start=1):
        if score is not None:
            core.train.report_validation_metrics(step, {"score": score})
        with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state").write_text("x" * 10)
"""


def saved(master: MasterForTest, experiment_id: int) -> list[tuple[list[float], int]]:
    """Wait for garbage collection; return (trial's scores, batches) of the rest."""

    def states() -> set[str]:
        return {one["state"] for one in checkpoints_of(master, experiment_id)}

    wait_for(lambda: "STATE_DELETED" in states() and num_pending_jobs(master.state) == 0, deadline_s=30)
    found = checkpoints_of(master, experiment_id)
    left = [one for one in found if one["state"] == "STATE_COMPLETED"]
    directory = master.state.path / "checkpoints"
    assert all((directory / one["uuid"] / "state").is_file() for one in left)
    assert not any((directory / one["uuid"]).exists() for one in found if one not in left)
    return sorted(
        (one["training"]["hparams"]["scores"], int(one["metadata"]["steps_completed"])) for one in left
    )


def test_checkpoints_are_kept_by_policy(shared_master: MasterForTest) -> None:
    one, other = [0.1, 0.9, 0.2], [0.3, 0.8, 0.4]
    given = config(
        hyperparameters={"scores": {"type": "categorical", "vals": [one, other]}},
        searcher={"name": "grid", "metric": "score", "smaller_is_better": True},
        checkpoint_storage={"save_experiment_best": 1, "save_trial_best": 0, "save_trial_latest": 2},
    )
    experiment_id = submit(shared_master, given, SAVE)
    wait_until(shared_master, experiment_id, "COMPLETED")

    assert saved(shared_master, experiment_id) == [(one, 1), (one, 3), (one, 4), (other, 3), (other, 4)]


def test_source_checkpoint_is_kept_deleted_source_is_refused(
    shared_master: MasterForTest,
) -> None:
    scores = {"scores": [0.3, 0.2, 0.1]}
    first = submit(shared_master, config(hyperparameters=scores), SAVE)
    wait_until(shared_master, first, "COMPLETED")
    assert [steps for _, steps in saved(shared_master, first)] == [3, 4]
    found = {one["metadata"]["steps_completed"]: one for one in checkpoints_of(shared_master, first)}

    def warm(uuid: str) -> dict[str, Any]:
        searcher = {"name": "single", "metric": "score", "source_checkpoint_uuid": uuid}
        return config("true", searcher=searcher)

    with pytest.raises(DstrialError, match="source_checkpoint_uuid"):
        submit(shared_master, warm(found[1]["uuid"]))
    second = submit(shared_master, warm(found[3]["uuid"]))
    wait_until(shared_master, second, "COMPLETED")
    numbers = [f"--save-{name}=0" for name in ("experiment-best", "trial-best", "trial-latest")]
    done = shared_master.det("e", "set", "gc-policy", *numbers, "--yes", str(first))
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: [steps for _, steps in saved(shared_master, first)] == [3], deadline_s=30)
