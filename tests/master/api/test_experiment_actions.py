"""Actions on experiments, log cleanup and durations."""

from __future__ import annotations

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

pytestmark = pytest.mark.process


def test_cleanup_logs_deletes_expired_logs(
    session: api.Session, admin: api.Session, fresh_master: Master
) -> None:
    fresh_master.change("UPDATE allocations SET state = 'TERMINATED', end_us = 2, exit_code = 0")
    for trial_id in (1, 2):
        fresh_master.change(
            "INSERT INTO logs (task_id, trial_id, time_us, source, log) VALUES ('t', ?, 1, 'task', 'x')",
            trial_id,
        )
    fresh_master.change("UPDATE trials SET end_us = 3 WHERE id IN (1, 2)")
    bindings.put_PutTrialRetainLogs(
        session, body=bindings.v1PutTrialRetainLogsRequest(trialId=1, numDays=1), trialId=1
    )
    assert fresh_master.send("POST", "/api/v1/cleanup_logs", token="determined").status == 403
    removed = bindings.post_CleanupLogs(admin).removedCount
    assert int(removed) == 1
    assert [
        row["trial_id"]
        for row in fresh_master.rows("SELECT DISTINCT trial_id FROM logs WHERE source = 'task'")
    ] == [2]


def test_experiment_duration_and_trial_runner_state(session: api.Session, fresh_master: Master) -> None:
    fresh_master.change("UPDATE trials SET start_us = 1, end_us = 90500001 WHERE id = 1")
    fresh_master.change("UPDATE experiments SET start_us = 1, end_us = 91500001 WHERE id = 1")
    started = "CAST(strftime('%s', 'now') AS INTEGER) * 1000000 - 3600000000"
    fresh_master.change(f"UPDATE trials SET start_us = {started} WHERE id = 2")
    fresh_master.change(f"UPDATE experiments SET start_us = {started} WHERE id = 2")
    state = bindings.v1TrialRunnerMetadata(state="validating")
    bindings.post_PostTrialRunnerMetadata(session, body=state, trialId=1)

    assert bindings.get_GetExperiment(session, experimentId=1).experiment.duration == 91
    assert 3600 <= (bindings.get_GetExperiment(session, experimentId=2).experiment.duration or 0) < 7200
    # `det experiment create --test` reads runnerState.
    assert bindings.get_GetTrial(session, trialId=1).trial.runnerState == "validating"
    assert bindings.get_GetTrial(session, trialId=2).trial.runnerState == "UNSPECIFIED"
