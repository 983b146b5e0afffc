"""Retention: ``dstrial run`` and ``det experiment create`` keep the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.cli.submit import Submission
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

DEADLINE_S = 240

# Batches 2 and 3 tie for the best loss, and the earlier batch is kept. Batch 7 is the newest.
SCRIPT = """
import dstrial

VALUES = [3.0, 1.0, 1.0, 2.0, 5.0, 4.0, 6.0]
with dstrial.core_context() as context:
    for batch, value in enumerate(VALUES, start=1):
        context.train.report_validation_metrics(batch, {"loss": value})
        with context.checkpoint.store_path({"steps_completed": batch}) as (path, _):
            (path / "state").write_text(str(batch))
"""


SECTION = "save_experiment_best: 1, save_trial_best: 0, save_trial_latest: 2"
KEPT = [2, 6, 7]


@pytest.mark.ranks
def test_run_and_det_create_keep_same_checkpoints(tmp_path: Path, shared_master: MasterForTest) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "train.py").write_text(SCRIPT)
    (tmp_path / "exp.yaml").write_text(
        "name: keeps\nentrypoint: python3 -m dstrial.launch train.py\nmax_restarts: 0\n"
        "resources: {slots_per_trial: 1}\nsearcher: {name: single, metric: loss, max_length: {batches: 7}}\n"
        f"checkpoint_storage: {{type: shared_fs, host_path: {tmp_path / 'storage'}, {SECTION}}}\n"
    )
    ended = shared_master.dstrial("run", "exp.yaml", "context", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = (tmp_path / "runs").glob("*/*/run.json")
    run_directory = RunDirectory(record.parent)
    submitted = Submission.read(run_directory)
    assert submitted is not None
    created = shared_master.det(
        "e", "create", "exp.yaml", "context", "-f", cwd=tmp_path, deadline_s=DEADLINE_S
    )
    assert created.returncode == 0, created.stdout + created.stderr
    client = shared_master.client()
    of_det = max(
        row["id"]
        for row in client.get("/api/v1/experiments?limit=-1")["experiments"]
        if row["name"] == "keeps"
    )
    assert of_det != submitted.experiment_id

    def completed(experiment_id: int) -> list[int]:
        found: list[dict[str, Any]] = client.get(f"/api/v1/experiments/{experiment_id}/checkpoints")[
            "checkpoints"
        ]
        return sorted(
            row["metadata"]["steps_completed"] for row in found if row["state"] == "STATE_COMPLETED"
        )

    # The master deletes checkpoints after the end of an experiment.
    wait_for(lambda: len(completed(of_det)) == len(KEPT), f"{completed(of_det)} are kept by det")
    wait_for(
        lambda: len(completed(submitted.experiment_id)) == len(KEPT),
        f"{completed(submitted.experiment_id)} are kept by dstrial run",
    )
    assert completed(of_det) == KEPT
    assert completed(submitted.experiment_id) == KEPT
    stored = list_checkpoints(run_directory.checkpoints_path)
    assert sorted(checkpoint.steps_completed for checkpoint in stored) == KEPT
