"""API of the job queue and of tasks."""

from __future__ import annotations

import base64

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

from dstrial.master.store.reports import logs

pytestmark = pytest.mark.process


def _queue(session: api.Session) -> list[bindings.v1Job]:
    return [job.full for job in bindings.get_GetJobsV2(session).jobs if job.full is not None]


def test_job_queue_shows_running_and_queued_jobs(fresh_master: Master, session: api.Session) -> None:
    fresh_master.change("UPDATE allocations SET state = 'TERMINATED' WHERE trial_id = 2")
    first, second = _queue(session)
    assert first.summary is not None
    assert second.summary is not None
    assert (first.jobId, first.allocatedSlots, first.requestedSlots) == ("job-1", 1, 1)
    assert (first.summary.state, first.summary.jobsAhead) == (bindings.jobv1State.SCHEDULED, 0)
    assert (second.allocatedSlots, second.requestedSlots) == (0, 1)
    assert (second.summary.state, second.summary.jobsAhead) == (bindings.jobv1State.QUEUED, 1)


def test_job_with_higher_priority_comes_first(fresh_master: Master, session: api.Session) -> None:
    seen = fresh_master.services.pubsub.version("scheduler")
    update = bindings.v1QueueControl(jobId="job-2", priority=1)
    bindings.post_UpdateJobQueue(session, body=bindings.v1UpdateJobQueueRequest(updates=[update]))
    assert [job.jobId for job in _queue(session)] == ["job-2", "job-1"]
    assert fresh_master.services.pubsub.version("scheduler") > seen
    assert fresh_master.rows(
        "SELECT config ->> '$.resources.priority' AS priority FROM experiments WHERE id = 2"
    ) == [{"priority": 1}]


def test_job_moves_ahead_of_or_behind_another(session: api.Session) -> None:
    for control in (
        bindings.v1QueueControl(jobId="job-2", aheadOf="job-1"),
        bindings.v1QueueControl(jobId="job-2", behindOf="job-1"),
        bindings.v1QueueControl(jobId="job-1", behindOf="job-2"),
    ):
        bindings.post_UpdateJobQueue(session, body=bindings.v1UpdateJobQueueRequest(updates=[control]))
        order = [job.jobId for job in _queue(session)]
        expected = ["job-1", "job-2"] if control.jobId == "job-2" and control.behindOf else ["job-2", "job-1"]
        assert order == expected


@pytest.mark.parametrize(
    ("control", "status"),
    [
        ({"jobId": "none", "priority": 1}, 404),
        ({"priority": 1}, 400),
        ({"jobId": "job-1", "priority": 0}, 400),
        ({"jobId": "job-1", "priority": 100}, 400),
        ({"jobId": "job-1", "weight": -1}, 400),
        ({"jobId": "job-1", "resourcePool": "elsewhere"}, 400),
        ({"jobId": "job-1", "aheadOf": "none"}, 404),
    ],
)
def test_invalid_queue_update_changes_nothing(
    served: Master, control: dict[str, object], status: int
) -> None:
    before = served.rows("SELECT id, priority, weight, queue_position FROM experiments")
    body = {"updates": [{"jobId": "job-2", "priority": 3}, control]}
    assert served.send("POST", "/api/v1/job-queues", body, token="determined").status == status
    assert served.rows("SELECT id, priority, weight, queue_position FROM experiments") == before


def test_task_lists_allocations(fresh_master: Master, session: api.Session) -> None:
    task = bindings.get_GetTask(session, taskId="1.request").task
    assert task.taskType is bindings.v1TaskType.TRIAL
    (allocation,) = task.allocations
    assert allocation.allocationId == "1.request.1"
    assert allocation.state is bindings.taskv1State.RUNNING
    assert fresh_master.get("/api/v1/tasks/none").status == 404


def _task(master: Master, **fields: object) -> str:
    body = {"config": "entrypoint: 'true'", **fields}
    answer = master.send("POST", "/api/v1/generic-tasks", body, token="determined")
    assert answer.status == 200, answer.content
    return str(answer.json["taskId"])


def test_task_fork_fails_after_context_is_deleted(fresh_master: Master) -> None:
    file = {
        "path": "a.txt",
        "type": 48,
        "content": base64.b64encode(b"a").decode(),
        "mtime": "0",
        "mode": 384,
    }
    task_id = _task(fresh_master, contextDirectory=[file])
    fresh_master.change("UPDATE commands SET state = 'COMPLETED', end_us = 1 WHERE task_id = ?", task_id)
    fork = _task(fresh_master, forkedFrom=task_id)
    fresh_master.services.database.write(lambda tx: logs.forget_old(tx, 1))

    for fields in ({"forkedFrom": task_id}, {"parentId": task_id, "inheritContext": True}):
        body = {"config": "entrypoint: 'true'", **fields}
        answer = fresh_master.send("POST", "/api/v1/generic-tasks", body, token="determined")
        assert answer.status == 400
        assert f"the context of task {task_id} is deleted" in answer.error
        assert "log_retention_days" in answer.error
    _task(fresh_master, forkedFrom=task_id, contextDirectory=[file])
    _task(fresh_master, forkedFrom=fork)
