"""Log retention and workspaces bound to the resource pool."""

from __future__ import annotations

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from serving import Master

from dstrial.master.clock import now_us
from dstrial.master.store.reports import logs

pytestmark = pytest.mark.process


def test_log_retention_days_are_shown(session: api.Session, fresh_master: Master) -> None:
    def kept() -> set[int | None]:
        listed = bindings.get_GetExperimentTrials(session, experimentId=1).trials
        return {bindings.get_GetTrial(session, trialId=1).trial.logRetentionDays, listed[0].logRetentionDays}

    assert kept() == {-1}
    fresh_master.change("UPDATE experiments SET log_retention_days = 7 WHERE id = 1")
    assert kept() == {7}
    for days in (2, -1):
        body = bindings.v1PutTrialRetainLogsRequest(trialId=1, numDays=days)
        bindings.put_PutTrialRetainLogs(session, body=body, trialId=1)
        assert kept() == {days}


@pytest.mark.parametrize(
    ("experiment_days", "trial_days", "age_days", "is_kept"),
    [
        (None, None, 3, False),
        (None, None, 1, True),
        (-1, None, 3, True),
        (0, None, 1, False),
        (None, 9, 3, True),
    ],
)
def test_logs_are_deleted_after_retention_days(
    fresh_master: Master, experiment_days: int | None, trial_days: int | None, age_days: int, is_kept: bool
) -> None:
    end_us = now_us() - age_days * 24 * 3600 * 1_000_000
    fresh_master.change("UPDATE experiments SET log_retention_days = ?", experiment_days)
    fresh_master.change("UPDATE trials SET end_us = ?, log_retention_days = ?", end_us, trial_days)
    fresh_master.change(
        "INSERT INTO logs (task_id, trial_id, time_us, source, log) VALUES ('t', 1, 1, 'task', 'x')"
    )

    fresh_master.services.database.write(lambda tx: logs.forget_old(tx, 2))

    assert bool(fresh_master.rows("SELECT id FROM logs WHERE trial_id = 1")) == is_kept


def test_resource_pool_is_bound_to_no_workspace(session: api.Session) -> None:
    found = bindings.get_ListWorkspacesBoundToRP(session, resourcePoolName="default", limit=5)
    assert found.workspaceIds == []
    assert found.pagination is not None
    assert (found.pagination.limit, found.pagination.total) == (5, 0)
    with pytest.raises(errors.APIException, match="expected at least -2"):
        bindings.get_ListWorkspacesBoundToRP(session, resourcePoolName="default", limit=-3)
    with pytest.raises(errors.NotFoundException, match="expected 'default', the only one"):
        bindings.get_ListWorkspacesBoundToRP(session, resourcePoolName="other")
    body = bindings.v1BindRPToWorkspaceRequest(resourcePoolName="default", workspaceIds=[1])
    with pytest.raises(errors.APIException, match="is not offered") as refused:
        bindings.post_BindRPToWorkspace(session, body=body, resourcePoolName="default")
    assert refused.value.status_code == 501
