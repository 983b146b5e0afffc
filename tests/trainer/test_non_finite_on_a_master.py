"""Non-finite trials in a search on a master, and under ``dstrial run``."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import deepspeed_config, experiment, submit
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.ranks, pytest.mark.process]


def config_of(**changes) -> dict:
    given = experiment(
        {"deepspeed_config": deepspeed_config(0), "nan_from": 4}, batches=12, report=2, checkpoint=2
    )
    return {
        **given,
        "entrypoint": "python3 -m dstrial.launch --trial poisoned_trials:Poisoned",
        "resources": {"slots_per_trial": 1},
        "max_restarts": 3,
        **changes,
    }


def test_search_counts_non_finite_trial_as_early_exit(shared_master: MasterForTest, tmp_path: Path) -> None:
    hparams = config_of()["hyperparameters"] | {"nan_from": {"type": "categorical", "vals": [4, 1000]}}
    searcher = {"name": "grid", "metric": "validation_loss", "max_length": {"batches": 12}}
    experiment_id = submit(shared_master, tmp_path, config_of(hyperparameters=hparams, searcher=searcher))
    client = shared_master.client()

    def state() -> str:
        return str(client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"])

    wait_for(lambda: state() in ("STATE_COMPLETED", "STATE_ERROR"), deadline_s=300)
    trials = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
    by_start = {trial["hparams"]["nan_from"]: trial for trial in trials}
    assert state() == "STATE_COMPLETED"  # the other trial has a result
    assert by_start[1000]["state"].endswith("COMPLETED")
    assert by_start[4]["state"].endswith("ERROR")
    assert by_start[4]["restarts"] == 0  # it was not restarted
    log = shared_master.det("trial", "logs", str(by_start[4]["id"])).stdout
    assert "since batch 5" in log
    assert log.count("resources failed") == 1
    assert "its losses stay non-finite, and a restart would repeat that" in log
