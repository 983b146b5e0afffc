"""Limits of an account and a QOS, as ``sacctmgr`` lists them; pure.

Slurm queues a larger job, unless its QOS has ``DenyOnLimit``, and never starts it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from dstrial.slurm.nodelist import expand_nodes

_SACCTMGR = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show")
_OF_QOS = (
    ("GrpTRES", "all its jobs"),
    ("MaxTRES", "a job"),
    ("MaxTRESPU", "a user"),
    ("MaxTRESPA", "an account"),
)
_NOUNS = {"cpu": "processor", "node": "node"}


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Size of a job; ``counts`` by Slurm's names ``cpu`` and ``node``."""

    counts: Mapping[str, int]
    partition: str


@dataclasses.dataclass(frozen=True, slots=True)
class Association:
    """Limits of a user or an account; a line of ``sacctmgr show assoc``.

    Attributes:
        user: empty for the account itself.
        partition: empty for all.
        qos: default of jobs; empty if unknown.
        most_together: of all its jobs.
        most: of a job.
    """

    cluster: str
    user: str
    partition: str
    qos: str
    most_together: Mapping[str, int]
    most: Mapping[str, int]


def default_account_of(user: str) -> list[str]:
    """Return the command that prints a user's default account."""
    return [*_SACCTMGR, "user", user, "format=DefaultAccount"]


def associations_of(account: str) -> list[str]:
    return [
        *_SACCTMGR,
        "assoc",
        f"account={account}",
        "format=Cluster,User,Partition,DefaultQOS,GrpTRES,MaxTRES",
    ]


def limits_of(qos: str) -> list[str]:
    return [*_SACCTMGR, "qos", qos, f"format={','.join(name for name, _ in _OF_QOS)}"]


def size_of(said: str) -> Size | None:
    """Parse the size of a job from ``sbatch --test-only``; None without one."""
    found = re.search(r"using (\d+) processors on nodes (\S+) in partition (\S+)", said)
    if found is None:
        return None
    return Size({"cpu": int(found[1]), "node": len(expand_nodes(found[2]))}, found[3])


def parse_associations(text: str) -> list[Association]:
    rows = [line.split("|") for line in text.splitlines()]
    return [
        Association(cluster, user, partition, qos, _counts(together), _counts(most))
        for cluster, user, partition, qos, together, most in (row for row in rows if len(row) == 6)
    ]


def parse_limits(text: str) -> dict[str, Mapping[str, int]]:
    """Parse the output of ``limits_of``: counts by the limit's name."""
    names = [name for name, _ in _OF_QOS]
    rows = [line.split("|") for line in text.splitlines()]
    return next(
        (dict(zip(names, map(_counts, row), strict=True)) for row in rows if len(row) == len(names)), {}
    )


def own_associations(found: Sequence[Association], user: str, partition: str) -> list[Association]:
    """Return a user's associations that count for a job, one for each cluster."""
    own = [one for one in found if one.user == user and one.partition in ("", partition)]
    return list({one.cluster: one for one in sorted(own, key=lambda one: one.partition)}.values())


def over_qos(size: Size, qos: str, limits: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return which limit of a QOS a job of this size exceeds; None without one."""
    for name, who in _OF_QOS:
        for what, most in limits.get(name, {}).items():
            if size.counts.get(what, 0) > most:
                return _over(f"QOS {qos}", f"{name} {what}={most}", who, size, what)
    return None


def over_account(
    size: Size,
    account: str,
    user: str,
    found: Sequence[Association],
    limits: Mapping[str, Mapping[str, int]],
) -> str | None:
    """Return which limit of an account the job exceeds; None without one.

    A limit of the QOS replaces the account's.
    """
    for one in found:
        if one.user not in ("", user) or one.partition not in ("", size.partition):
            continue
        for name, who, counts in (
            ("GrpTRES", "all its jobs", one.most_together),
            ("MaxTRES", "a job", one.most),
        ):
            for what, most in counts.items():
                if size.counts.get(what, 0) > most and what not in limits.get(name, {}):
                    return _over(f"account {account}", f"{name} {what}={most}", who, size, what)
    return None


def _over(whose: str, limit: str, who: str, size: Size, what: str) -> str:
    count = size.counts[what]
    noun = f"{_NOUNS[what]}{'s' if count != 1 else ''}"
    return f"{whose} has {limit} for {who}, and the job needs {count} {noun}"


def _counts(text: str) -> Mapping[str, int]:
    """Parse ``cpu=2,node=1``; leave out values with a unit or another name."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: int(count) for name, _, count in pairs if name in _NOUNS and count.isdecimal()}
