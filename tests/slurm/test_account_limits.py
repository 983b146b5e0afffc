"""What an account and a QOS let a job have, by what sacctmgr of Slurm 22.05 prints."""

from __future__ import annotations

from dstrial.slurm.limits import (
    over_account,
    over_qos,
    own_associations,
    parse_associations,
    parse_limits,
    size_of,
)

_ASSOCIATIONS = """test||||cpu=4|cpu=3
test|root||tiny||cpu=3
test|root|high|||
test|other||||cpu=1
far|root||normal||
"""


def test_the_size_of_a_job_is_what_sbatch_would_take() -> None:
    size = size_of(
        "sbatch: Job 9 to start at 8151-07-01T03:59:49 using 3 processors on nodes host[1-2] in partition low\n"
    )
    assert size is not None
    assert (size.counts, size.partition) == ({"cpu": 3, "node": 2}, "low")
    assert size_of("sbatch: error: invalid partition specified: nope") is None


def test_what_no_job_of_its_size_keeps_to_is_said() -> None:
    size = size_of("sbatch: Job 9 to start at x using 3 processors on nodes host[1-2] in partition low")
    assert size is not None
    assert over_qos(size, "tiny", parse_limits("|||\n")) is None
    assert over_qos(size, "tiny", parse_limits("cpu=4,mem=2G|cpu=3,node=2|cpu=8|gres/gpu=1\n")) is None
    assert over_qos(size, "tiny", parse_limits("||cpu=2|\n")) == (
        "QOS tiny has MaxTRESPU cpu=2 for a user, and the job needs 3 processors"
    )
    assert over_qos(size, "tiny", parse_limits("|node=1||\n")) == (
        "QOS tiny has MaxTRES node=1 for a job, and the job needs 2 nodes"
    )
    assert parse_limits("") == {}


def test_a_limit_of_the_qos_counts_in_place_of_the_accounts() -> None:
    found = parse_associations(_ASSOCIATIONS)
    size = size_of("sbatch: Job 9 to start at x using 5 processors on nodes host1 in partition low")
    assert size is not None
    assert over_account(size, "lab", "root", found, {}) == (
        "account lab has GrpTRES cpu=4 for all its jobs, and the job needs 5 processors"
    )
    assert over_account(size, "lab", "root", found, parse_limits("cpu=9|cpu=9||\n")) is None
    small = size_of("sbatch: Job 9 to start at x using 2 processors on nodes host1 in partition low")
    assert small is not None
    assert over_account(small, "lab", "root", found, {}) is None, "another user's limit"


def test_of_a_users_associations_that_with_the_partition_counts() -> None:
    found = parse_associations(_ASSOCIATIONS)
    assert [(one.cluster, one.partition, one.qos) for one in own_associations(found, "root", "low")] == [
        ("test", "", "tiny"),
        ("far", "", "normal"),
    ]
    assert [(one.cluster, one.partition) for one in own_associations(found, "root", "high")] == [
        ("test", "high"),
        ("far", ""),
    ]
    assert own_associations(found, "nobody", "low") == []
