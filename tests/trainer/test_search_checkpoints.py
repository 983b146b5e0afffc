"""Verification and export of a search's checkpoints without its master."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from small_runs import DEFINITIONS, deepspeed_config, experiment
from waiting import wait_for

from dstrial.cli.experiment_arguments import newest_resumable, resume_point
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.ranks, pytest.mark.process, pytest.mark.timeout(600)]


def test_best_search_checkpoint_is_verified_and_exported(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    dropout = {"type": "categorical", "vals": [0.1, 0.2]}
    given = experiment({"deepspeed_config": deepspeed_config(1), "dropout": dropout}, batches=8, checkpoint=4)
    searcher = {"name": "grid", "metric": "validation_loss", "max_length": {"batches": 8}}
    path, runs = tmp_path / "exp.yaml", ("--runs-dir", str(tmp_path / "runs"))
    path.write_text(yaml.safe_dump(given | {"searcher": searcher, "resources": {"slots_per_trial": 2}}))

    ended = shared_master.dstrial("run", str(path), str(DEFINITIONS), *runs)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = re.search(r"^  best: +checkpoints/(\S+)$", ended.stdout, re.M)
    assert printed is not None, ended.stdout
    (record,) = (tmp_path / "runs").glob("*/*/run.json")
    run = RunDirectory(record.parent)
    # The master deletes earlier checkpoints in the background, after the search has ended.
    wait_for(
        lambda: {found.steps_completed for found in list_checkpoints(run.checkpoints_path)} == {8},
        "earlier checkpoints are not deleted",
        deadline_s=30,
    )
    assert printed[1] in {found.uuid for found in list_checkpoints(run.checkpoints_path)}
    without_master = ("--state-dir", str(tmp_path / "no-master"))
    for words in (
        ("verify", "best"),
        ("inspect", printed[1]),
        ("export", printed[1], str(tmp_path / "model.safetensors"), "--format", "safetensors"),
    ):
        done = shared_master.dstrial("checkpoint", *words, *runs, *without_master)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no completion mark" not in done.stdout
    of_run = shared_master.dstrial("checkpoint", "verify", str(run.path), *runs)
    assert "is a search, whose checkpoints belong to several trials" in of_run.stderr
    # `latest` does not resume a search; a single trial can start from its checkpoint as a new run.
    assert newest_resumable([run]) is None
    point = resume_point(
        str(run.checkpoints_path / printed[1]), runs_dir=tmp_path, name="small", context_dir=tmp_path
    )
    assert point.run_directory is None
