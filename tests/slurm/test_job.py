"""What Slurm's controller says of a job, as Slurm 22.05 has printed it."""

from __future__ import annotations

import pytest

from dstrial.slurm.client import refused
from dstrial.slurm.job import Job, explained, is_for_ever, parse_job

_RUNNING = (
    "JobId=9 JobName=small UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901752 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:04 "
    "TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-24T10:29:33 EligibleTime=2026-11-24T10:29:33 AccrueTime=Unknown "
    "StartTime=2026-11-24T10:29:34 EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
    "PreemptEligibleTime=2026-11-24T10:29:34 PreemptTime=None LastSchedEval=2026-11-24T10:29:34 Scheduler=Backfill Partition=low "
    "AllocNode:Sid=host1:260 ReqNodeList=(null) ExcNodeList=(null) NodeList=host[1-2] BatchHost=host1 NumNodes=2 NumCPUs=2 "
    "NumTasks=2 CPUs/Task=1 StdErr=/w/slurm.log StdIn=/dev/null StdOut=/w/slurm.log Power="
)


def test_a_running_job() -> None:
    job = parse_job(_RUNNING)
    assert job == Job(9, "RUNNING", "", "host[1-2]", 0, 0, 1, False, "/w/slurm.log", "2026-11-24T10:29:34")
    assert job.described == "running on host[1-2]"
    assert not job.is_waiting
    assert not job.is_over


def test_a_path_may_have_blanks() -> None:
    job = parse_job(_RUNNING.replace("StdOut=/w/slurm.log", "StdOut=/w/my place, 100%/slurm.log"))
    assert job is not None
    assert job.output == "/w/my place, 100%/slurm.log"


def test_a_preempted_job_is_known_by_its_time() -> None:
    text = _RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-24T10:40:00")
    job = parse_job(text)
    assert job is not None
    assert job.is_preempted


@pytest.mark.parametrize(
    ("state", "is_waiting", "is_over"),
    [
        ("PENDING", True, False),
        ("CONFIGURING", True, False),
        ("REQUEUE_HOLD", True, False),
        ("COMPLETING", False, False),
        ("COMPLETED", False, True),
        ("CANCELLED", False, True),
        ("TIMEOUT", False, True),
        ("NODE_FAIL", False, True),
        ("OUT_OF_MEMORY", False, True),
    ],
)
def test_states(state: str, is_waiting: bool, is_over: bool) -> None:
    job = Job(1, state)
    assert (job.is_waiting, job.is_over) == (is_waiting, is_over)


def test_a_waiting_job_says_why_in_words() -> None:
    job = parse_job(_RUNNING.replace("RUNNING Reason=None", "PENDING Reason=Resources"))
    assert job is not None
    assert job.described == "pending (Resources: waits for nodes to become free)"
    assert explained("ReqNodeNotAvail,_UnavailableNodes:host3").startswith(
        "ReqNodeNotAvail,_UnavailableNodes:host3: "
    )
    assert explained("SomethingNew") == "SomethingNew"
    assert Job(1, "FAILED", exit_code=3).described == "failed (exit code 3)"


@pytest.mark.parametrize(
    ("reason", "said", "expected"),
    [
        ("QOSMaxCpuPerJobLimit", "asks for more than its QOS lets a job have", True),
        ("AssocMaxWallDurationPerJobLimit", "asks for more than its account lets a job have", True),
        ("QOSMaxCpuPerUserLimit", "its user has as much as its QOS lets a user have at once", False),
        ("QOSMaxJobsPerUserLimit", "its user has as many jobs as may run at once", False),
        (
            "AssocGrpCpuLimit",
            "waits for jobs of its account to end, which have as much as they may together",
            False,
        ),
        ("QOSGrpCPUMinutesLimit", "waits until its QOS has time to give again", False),
        ("PartitionTimeLimit", "asks for more time than its partition lets a job have", True),
        ("Resources", "waits for nodes to become free", False),
    ],
)
def test_a_limit_is_told_in_words_and_only_that_of_one_job_lasts(
    reason: str, said: str, *, expected: bool
) -> None:
    assert explained(reason) == f"{reason}: {said}"
    assert is_for_ever(reason) == expected


def test_what_is_no_job() -> None:
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_job("") is None


def test_a_refusal_keeps_what_sbatch_said_and_adds_what_to_do() -> None:
    text = refused(
        "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name "
        "specified\n",
        "/w/sbatch.sh",
    )
    assert text == (
        "Slurm does not take the job; sbatch says: invalid partition specified: nope; Batch job submission failed: Invalid "
        "partition name specified. Name one that `sinfo` lists (--partition=NAME in slurm.sbatch_args, or behind --sbatch-arg=)."
    )
    assert refused("", "/w/sbatch.sh").endswith("sbatch says: nothing. Look at /w/sbatch.sh.")
