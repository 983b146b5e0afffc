"""What ``squeue`` and ``sinfo`` say, as Slurm 22.05 has printed it."""

from __future__ import annotations

import pytest

from dstrial.slurm.client import is_away, is_not_yet, queued_as, why_away
from dstrial.slurm.squeue import (
    QueuedJob,
    is_up,
    parse_nodes,
    parse_queue,
    refused_options,
    seconds,
)

_QUEUE = """\
7|PENDING|Resources|N/A|UNLIMITED|UNLIMITED||trial-3@1f2a|
5|RUNNING|None|2026-11-24T14:52:12|364-23:59:59|UNLIMITED|host[1-2]|a name|with bars|
4|RUNNING|None|N/A|1:30|20:00|host3|trial-2@1f2a|
3|FAILED|BadConstraints|N/A|UNLIMITED|UNLIMITED||three|
"""


def test_each_line_is_a_job() -> None:
    waits, preempted, late, failed = parse_queue(_QUEUE)
    assert waits == QueuedJob("7", "trial-3@1f2a", "PENDING", "Resources", limit="UNLIMITED")
    assert waits.text == "job 7: pending (Resources: waits for nodes to become free)"
    assert waits.is_pending
    assert preempted.name == "a name|with bars"
    assert preempted.text == "job 5 is preempted: another job gets its nodes"
    assert late.text == "job 4 ends at its time limit in 90 s"
    assert failed.is_over
    assert failed.text == "job 3 has ended (failed) (BadConstraints)"


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
def test_it_leaves_in_time_to_save_a_checkpoint(left_s: int | None, limit: str, leaves: bool) -> None:
    job = QueuedJob("1", "x", "RUNNING", left_s=left_s, limit=limit, nodes="host1")
    assert (job.why_leaving is not None) == leaves
    assert leaves or job.text == "job 1: running on host1"


def test_what_is_being_ended_leaves_and_what_has_ended_says_why() -> None:
    assert QueuedJob("1", "x", "COMPLETING").why_leaving == "is being ended (completing)"
    for state, words in (
        ("CANCELLED", "was cancelled"),
        ("PREEMPTED", "another job"),
        ("NODE_FAIL", "its nodes"),
    ):
        job = QueuedJob("1", "x", state)
        assert job.is_over
        assert job.why_leaving is None
        assert words in job.text


def test_times() -> None:
    assert seconds("1-02:03:04") == 93784
    assert seconds("3:04") == 184
    assert seconds("UNLIMITED") is None


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
    assert [is_up(state) for state in ("allocated", "idle~", "down*", "drained")] == [
        True,
        True,
        False,
        False,
    ]


def test_options_that_would_make_another_job_of_it() -> None:
    options = ["--partition=low", "--job-name=mine", "-Jmine", "--array=1-3", "-p low", "--output x"]
    assert refused_options(options) == ["--job-name=mine", "-Jmine", "--array=1-3", "--output x"]


def test_options_that_would_give_it_to_another_cluster() -> None:
    options = ["--clusters=far", "-M far", "-Mfar", "--cluster-constraint=x", "--mem=4G"]
    assert refused_options(options) == ["--clusters=far", "-M far", "-Mfar"]


def test_a_controller_that_is_away_is_told_from_a_refusal() -> None:
    said = "squeue: error: slurm_load_jobs: Unable to contact slurm controller (connect failure)"
    assert is_away(said)
    assert why_away(said, "squeue", 1) == (
        "squeue says: slurm_load_jobs: Unable to contact slurm controller (connect failure)"
    )
    assert not is_away("sbatch: error: invalid partition specified: none")
    assert why_away("", "squeue", 1) == "squeue ended with 1"


def test_nodes_of_which_a_fresh_controller_knows_nothing_yet_count() -> None:
    assert is_up("unknown")


def test_refusals_of_a_controller_that_does_not_know_its_nodes_are_those_of_sizes() -> None:
    assert is_not_yet("allocation failure: Requested node configuration is not available")
    assert is_not_yet("error: Invalid generic resource (gres) specification")
    assert not is_not_yet("sbatch: error: invalid partition specified: none")
    assert not is_not_yet("sbatch: unrecognized option '--frobnicate'")


def test_a_job_that_was_queued_though_the_answer_was_lost_is_found_by_its_script() -> None:
    said = "11|/shared/runs/a/sbatch.sh|\n12|/shared/my runs/100%/b|c/sbatch.sh|\n13|(null)|\n14|/shared/runs/a/sbatch.sh|\n"
    assert queued_as(said, "/shared/runs/a/sbatch.sh") == {11, 14}
    assert queued_as(said, "/shared/my runs/100%/b|c/sbatch.sh") == {12}
    assert queued_as(said, "/shared/runs/other/sbatch.sh") == set()
    assert queued_as("", "/shared/runs/a/sbatch.sh") == set()
