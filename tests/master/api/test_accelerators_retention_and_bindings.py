"""What accelerators a task has, how long its logs are kept, and who may use the pool."""

from __future__ import annotations

from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from serving import Master

pytestmark = pytest.mark.process
TASK, ALLOCATION = "1.request", "1.request.1"
DAY_US = 24 * 3600 * 1_000_000


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)


def accelerators(session: api.Session) -> list[dict[str, Any]]:
    found = bindings.get_GetTaskAcceleratorData(session, taskId=TASK).acceleratorData
    return [one.to_json(omit_unset=True) for one in found]


def tell(session: api.Session, **data: Any) -> None:
    """Say what ``determined.exec.prep_container`` says."""
    body = bindings.v1PostAllocationAcceleratorDataRequest(
        allocationId=ALLOCATION, acceleratorData=bindings.v1AcceleratorData(**data)
    )
    bindings.post_PostAllocationAcceleratorData(session, body=body, allocationId=ALLOCATION)


def test_the_accelerators_of_a_task_are_its_slots_until_its_containers_say_what_they_are(
    session: api.Session, fresh_master: Master
) -> None:
    agent = fresh_master.services.agent_id
    fresh_master.change("UPDATE allocations SET slots = '[0, 2, 77]' WHERE id = ?", ALLOCATION)
    resources = fresh_master.rows("SELECT resources_id AS id FROM allocations WHERE id = ?", ALLOCATION)
    common = {"allocationId": ALLOCATION, "taskId": TASK, "resourcePool": "default"}
    assert accelerators(session) == [
        {
            **common,
            "containerId": resources[0]["id"],
            "nodeName": agent,
            "acceleratorType": "cpu",
            "acceleratorUuids": ["cpu-0", "cpu-2"],
        }
    ]
    tell(session, containerId="c2", nodeName="far", acceleratorType="cuda", acceleratorUuids=["GPU-3"])
    tell(session, containerId="c1", acceleratorType="cuda", acceleratorUuids=["GPU-1"])
    tell(session, containerId="c1", acceleratorType="cuda", acceleratorUuids=["GPU-1", "GPU-2"])
    assert accelerators(session) == [
        {
            **common,
            "containerId": "c1",
            "nodeName": agent,
            "acceleratorType": "cuda",
            "acceleratorUuids": ["GPU-1", "GPU-2"],
        },
        {
            **common,
            "containerId": "c2",
            "nodeName": "far",
            "acceleratorType": "cuda",
            "acceleratorUuids": ["GPU-3"],
        },
    ]
    fresh_master.change("DELETE FROM allocations WHERE id = ?", ALLOCATION)
    assert accelerators(session) == []
    assert fresh_master.rows("SELECT * FROM allocation_accelerators") == []


def test_an_allocation_cannot_tell_of_containers_without_end(
    session: api.Session, fresh_master: Master
) -> None:
    def write(tx: Any) -> None:
        tx.executemany(
            "INSERT INTO allocation_accelerators VALUES (?, ?, 'n', 'cpu', '[]')",
            [(ALLOCATION, f"c{idx}") for idx in range(1024)],
        )

    fresh_master.services.database.write(write)
    tell(session, containerId="c5", acceleratorUuids=["a"])
    with pytest.raises(errors.APIException, match="1024 containers"):
        tell(session, containerId="another")


@pytest.mark.parametrize(
    "data",
    [
        {"acceleratorUuids": ["a"] * 1025},
        {"acceleratorUuids": ["a" * 257]},
        {"acceleratorUuids": [1]},
        {"containerId": "a" * 257},
        {"nodeName": 3},
    ],
)
def test_accelerators_that_make_no_sense_are_refused(served: Master, data: dict[str, Any]) -> None:
    path = f"/api/v1/allocations/{ALLOCATION}/acceleratorData"
    assert served.send("POST", path, {"acceleratorData": data}, token="trial-1").status == 400


def test_the_days_that_logs_are_kept_count_from_the_end(session: api.Session, fresh_master: Master) -> None:
    def left() -> int | None:
        return bindings.get_GetTrialRemainingLogRetentionDays(session, id=1).remainingDays

    def kept() -> set[int | None]:
        listed = bindings.get_GetExperimentTrials(session, experimentId=1).trials
        return {bindings.get_GetTrial(session, trialId=1).trial.logRetentionDays, listed[0].logRetentionDays}

    assert (left(), kept()) == (-1, {-1})
    fresh_master.change("UPDATE experiments SET log_retention_days = 7 WHERE id = 1")
    assert (left(), kept()) == (7, {7})
    now = "CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
    fresh_master.change(f"UPDATE trials SET end_us = {now} - ?", 2 * DAY_US + DAY_US // 2)
    assert left() == 5
    body = bindings.v1PutTrialRetainLogsRequest(trialId=1, numDays=2)
    bindings.put_PutTrialRetainLogs(session, body=body, trialId=1)
    assert (left(), kept()) == (0, {2})
    body = bindings.v1PutTrialRetainLogsRequest(trialId=1, numDays=-1)
    bindings.put_PutTrialRetainLogs(session, body=body, trialId=1)
    assert left() == -1


def test_the_pool_is_bound_to_no_workspace(session: api.Session) -> None:
    found = bindings.get_ListWorkspacesBoundToRP(session, resourcePoolName="default", limit=5)
    assert found.workspaceIds == []
    assert found.pagination is not None
    assert (found.pagination.limit, found.pagination.total) == (5, 0)
    with pytest.raises(errors.NotFoundException, match="expected 'default', the only one"):
        bindings.get_ListWorkspacesBoundToRP(session, resourcePoolName="other")
    body = bindings.v1BindRPToWorkspaceRequest(resourcePoolName="default", workspaceIds=[1])
    with pytest.raises(errors.APIException, match="is not offered") as refused:
        bindings.post_BindRPToWorkspace(session, body=body, resourcePoolName="default")
    assert refused.value.status_code == 501


def test_these_are_for_whom_the_trial_is(served: Master) -> None:
    accelerators, days = (
        f"/api/v1/tasks/{TASK}/acceleratorData",
        "/api/v1/trials/1/remaining_log_retention_days",
    )
    pool = "/api/v1/resource-pools/default/workspace-bindings"
    for path in (accelerators, days, pool):
        assert served.get(path, None).status == 401
        assert served.get(path, "other").status == 200
    for path in (accelerators, days):
        assert served.get(path, "trial-1").status == 200
        assert served.get(path, "trial-2").status == 403
    assert served.get(pool, "trial-1").status == 403
    assert (
        served.send("POST", f"/api/v1/allocations/{ALLOCATION}/acceleratorData", {}, token="trial-2").status
        == 403
    )
    assert served.get("/api/v1/tasks/none/acceleratorData").status == 404
    assert served.get("/api/v1/trials/99/remaining_log_retention_days").status == 404
    assert served.get("/api/v1/trials/x/remaining_log_retention_days").status == 400
    assert served.get(f"{pool}?limit=-3").status == 400
