"""System metrics of runs with ``profiling.enabled``, with and without a master."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings
from small_runs import deepspeed_config, experiment, submit, train
from waiting import wait_for

from dstrial.master.login import USERNAME, new_token
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.ranks]

GROUPS = {"cpu", "memory", "disk", "network"}
PROFILING = {"profiling": {"enabled": True}}


def config_of(**changes: Any) -> dict[str, Any]:
    hparams = {"deepspeed_config": deepspeed_config(1)}
    return experiment(hparams, batches=8, report=4, checkpoint=4, **changes)


def session_at(master: MasterForTest) -> api.Session:
    return api.Session(master.address, USERNAME, new_token(master.record), None)


def system_rows(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines())
    return [row for row in rows if row["group"] in GROUPS]


def test_two_ranks_report_system_metrics_once(tmp_path: Path) -> None:
    done = train(tmp_path, "DataParallelTrial", config_of(**PROFILING), ranks=2)
    assert done.returncode == 0, done.output

    rows = system_rows(done.directory.metrics_path)
    assert {row["group"] for row in rows} == GROUPS
    assert {row["steps_completed"] for row in rows} == {None}
    assert len({agent for row in rows for agent in row["metrics"]}) == 1
    times = [row["time"] for row in rows if row["group"] == "cpu"]
    assert len(times) == len(set(times))
    assert not list(done.directory.path.glob("metrics.node*"))

    again = train(
        tmp_path, "DataParallelTrial", config_of(**PROFILING), ranks=2, run=done, env={"DSTRIAL_TEST": "1"}
    )
    assert system_rows(again.directory.metrics_path) == rows, "a test run adds no rows and deletes none"


@pytest.mark.process
def test_master_stores_system_metrics_of_two_slots(shared_master: MasterForTest, tmp_path: Path) -> None:
    config = config_of(**PROFILING) | {
        "entrypoint": "python3 -m dstrial.launch --trial small_trials:DataParallelTrial",
        "resources": {"slots_per_trial": 2},
        "max_restarts": 0,
    }
    experiment_id = submit(shared_master, tmp_path, config)
    session = session_at(shared_master)

    def state() -> str:
        return bindings.get_GetExperiment(session, experimentId=experiment_id).experiment.state.value

    wait_for(lambda: state() in ("STATE_COMPLETED", "STATE_ERROR"), deadline_s=300)
    (trial,) = bindings.get_GetExperimentTrials(session, experimentId=experiment_id).trials
    log = shared_master.det("trial", "logs", str(trial.id)).stdout
    assert state() == "STATE_COMPLETED", log
    require_system_metrics(session, trial.id)


def require_system_metrics(session: api.Session, trial_id: int) -> None:
    def read(group: str) -> list[dict[str, dict[str, float]]]:
        lines = bindings.get_GetMetrics(session, trialIds=[trial_id], group=group)
        return [report.metrics["avg_metrics"] for line in lines for report in line.metrics]

    agents = {agent.id for agent in bindings.get_GetAgents(session).agents}
    for group, names in {
        "cpu": {"cpu_util_simple"},
        "memory": {"memory_free"},
        "network": {"net_throughput_recv", "net_throughput_sent"},
    }.items():
        found = read(group)
        assert found
        assert all(one.keys() == agents for one in found)
        assert all(names <= values.keys() for one in found for values in one.values())
    lines = bindings.get_GetMetrics(session, trialIds=[trial_id], group="cpu")
    times = [report.endTime for line in lines for report in line.metrics]
    assert len(times) == len(set(times)), "only one rank of the node reports"
