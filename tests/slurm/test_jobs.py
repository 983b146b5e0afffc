"""Parsing of output of squeue, sinfo and scontrol (Slurm 22.05)."""

from __future__ import annotations

import pytest

from dstrial.slurm.client import failure_reason, is_away, lacks_nodes, refused
from dstrial.slurm.jobs import (
    Job,
    is_up,
    parse_job,
    parse_nodes,
    parse_queue,
    seconds,
)
from dstrial.slurm.script import refused_options

_QUEUE = """\
7|PENDING|Resources|N/A|UNLIMITED|UNLIMITED||trial-3@1f2a|
5|RUNNING|None|2026-11-24T14:52:12|364-23:59:59|UNLIMITED|host[1-2]|a name|with bars|
4|RUNNING|None|N/A|1:30|20:00|host3|trial-2@1f2a|
3|FAILED|BadConstraints|N/A|UNLIMITED|UNLIMITED||three|
"""


def test_parse_queue_returns_job_per_line() -> None:
    pending, preempted, late, failed = parse_queue(_QUEUE)
    assert pending == Job("7", "PENDING", "Resources", name="trial-3@1f2a", limit="UNLIMITED")
    assert pending.described == "pending (Resources)"
    assert pending.is_waiting
    assert preempted.name == "a name|with bars"
    assert preempted.leaving_reason == "is preempted: another job gets its nodes"
    assert late.leaving_reason == "ends at its time limit in 90 s"
    assert failed.is_over
    assert failed.described == "failed (BadConstraints)"


@pytest.mark.parametrize(
    ("left_s", "limit", "leaves"),
    [
        (119, "10:00:00", True),
        (121, "10:00:00", False),
        (31, "5:00", False),
        (30, "5:00", True),
        (None, "UNLIMITED", False),
    ],
)
def test_job_leaves_before_limit_to_checkpoint(left_s: int | None, limit: str, leaves: bool) -> None:
    job = Job("1", "RUNNING", left_s=left_s, limit=limit, nodes="host1")
    assert (job.leaving_reason is not None) == leaves
    assert job.described == "running on host1"


def test_seconds_parses_slurm_durations() -> None:
    assert [seconds(text) for text in ("1-02:03:04", "3:04", "UNLIMITED")] == [93784, 184, None]


_NODES = """\
host1|allocated|2|(null)
host1|allocated|2|(null)
host2|down*|2|(null)
host3|drained|2|(null)
gpu1|mixed|64|gpu:a100:4(S:0-1),gpu:h100:2,shard:8
gpu2|idle~|64+|gpu:8
"""


def test_parse_nodes_returns_slots_and_states() -> None:
    assert parse_nodes(_NODES, wants_devices=False) == {
        "host1": (2, "allocated"),
        "host2": (2, "down*"),
        "host3": (2, "drained"),
        "gpu1": (64, "mixed"),
        "gpu2": (64, "idle~"),
    }
    assert parse_nodes(_NODES, wants_devices=True) == {"gpu1": (6, "mixed"), "gpu2": (8, "idle~")}
    by_16 = parse_nodes(_NODES, wants_devices=False, cpus_per_task=16)
    assert by_16 == {"gpu1": (4, "mixed"), "gpu2": (4, "idle~")}
    # An unknown node has not registered since the controller's start.
    states = ("allocated", "idle~", "unknown", "down*", "drained")
    assert [is_up(state) for state in states] == [True, True, True, False, False]


def test_options_for_other_job_or_cluster_are_refused() -> None:
    accepted = ["--partition=low", "-p low", "--cluster-constraint=x", "--mem=4G"]
    refused_ = ["--job-name=mine", "-Jmine", "--array=1-3", "--output x", "--clusters=far", "-M far", "-Mfar"]
    assert refused_options([*accepted, *refused_]) == refused_


def test_unreachable_controller_differs_from_rejection() -> None:
    said = "squeue: error: slurm_load_jobs: Unable to contact slurm controller (connect failure)"
    assert is_away(said)
    assert failure_reason(said, "squeue", 1) == (
        "squeue says: slurm_load_jobs: Unable to contact slurm controller (connect failure)"
    )
    assert not is_away("sbatch: error: invalid partition specified: none")
    assert failure_reason("", "squeue", 1) == "squeue ended with 1"


def test_lacks_nodes_matches_size_rejections() -> None:
    assert lacks_nodes("allocation failure: Requested node configuration is not available")
    assert lacks_nodes("error: Invalid generic resource (gres) specification")
    assert not lacks_nodes("sbatch: error: invalid partition specified: none")


_RUNNING = (
    "JobId=9 JobName=small UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901752 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:04 "
    "TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-24T10:29:33 EligibleTime=2026-11-24T10:29:33 AccrueTime=Unknown "
    "StartTime=2026-11-24T10:29:34 EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
    "PreemptEligibleTime=2026-11-24T10:29:34 PreemptTime=None LastSchedEval=2026-11-24T10:29:34 Scheduler=Backfill Partition=low "
    "AllocNode:Sid=host1:260 ReqNodeList=(null) ExcNodeList=(null) NodeList=host[1-2] BatchHost=host1 NumNodes=2 NumCPUs=2 "
    "NumTasks=2 CPUs/Task=1 StdErr=/w/slurm.log StdIn=/dev/null StdOut=/w/slurm.log Power="
)


def test_parse_job_reads_running_job() -> None:
    job = parse_job(_RUNNING)
    assert job == Job(
        "9",
        "RUNNING",
        nodes="host[1-2]",
        num_restarts=1,
        output="/w/slurm.log",
        begins_at="2026-11-24T10:29:34",
    )
    assert job.described == "running on host[1-2]"
    assert not job.is_waiting
    assert not job.is_over
    changed = _RUNNING.replace("StdOut=/w/slurm.log", "StdOut=/w/my place, 100%/slurm.log")
    job = parse_job(changed.replace("PreemptTime=None", "PreemptTime=2026-11-24T10:40:00"))
    assert job is not None
    assert (job.output, job.is_preempted) == ("/w/my place, 100%/slurm.log", True)
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is parse_job("") is None


def test_job_states_are_waiting_over_or_leaving() -> None:
    jobs = {
        state: Job("1", state)
        for state in (
            "PENDING", "CONFIGURING", "REQUEUE_HOLD", "COMPLETING", "COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL",
            "OUT_OF_MEMORY",
        )
    }  # fmt: skip
    assert [state for state, job in jobs.items() if job.is_waiting] == list(jobs)[:3]
    assert [state for state, job in jobs.items() if job.is_over] == list(jobs)[4:]
    assert {state: job.leaving_reason for state, job in jobs.items() if job.leaving_reason is not None} == {
        "COMPLETING": "is being ended (completing)"
    }


def test_rejection_message_has_sbatch_output_and_fix() -> None:
    text = refused(
        "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name "
        "specified\n",
        "/w/sbatch.sh",
    )
    assert text == (
        "Slurm rejects the job; sbatch says: invalid partition specified: nope; Batch job submission failed: Invalid "
        "partition name specified. Name one that `sinfo` lists (--partition=NAME in slurm.sbatch_args, or behind --sbatch-arg=)."
    )
    assert refused("", "/w/sbatch.sh").endswith("sbatch says: nothing. Look at /w/sbatch.sh.")
