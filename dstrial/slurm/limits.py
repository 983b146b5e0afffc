"""What an account and a QOS let a job have, as ``sacctmgr`` lists it; pure.

Slurm takes a job that is larger, unless its QOS has ``DenyOnLimit``, and never starts it.
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
    """How large a job would be.

    Attributes:
        counts: by Slurm's name of what is counted, ``cpu`` and ``node``.
        partition: that it is for.
    """

    counts: Mapping[str, int]
    partition: str


@dataclasses.dataclass(frozen=True, slots=True)
class Association:
    """What a user or an account may have; a line of ``sacctmgr show assoc``.

    Attributes:
        user: whose; empty for the account itself.
        partition: in which; empty for all.
        qos: that jobs have which name none; empty where that is not known.
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
    """Return the command that prints the account of a user's jobs that name none."""
    return [*_SACCTMGR, "user", user, "format=DefaultAccount"]


def associations_of(account: str) -> list[str]:
    """Return the command that ``parse_associations`` reads."""
    return [
        *_SACCTMGR,
        "assoc",
        f"account={account}",
        "format=Cluster,User,Partition,DefaultQOS,GrpTRES,MaxTRES",
    ]


def limits_of(qos: str) -> list[str]:
    """Return the command that ``parse_limits`` reads."""
    return [*_SACCTMGR, "qos", qos, f"format={','.join(name for name, _ in _OF_QOS)}"]


def size_of(said: str) -> Size | None:
    """Read the size of a job from ``sbatch --test-only``; None if it says none."""
    found = re.search(r"using (\d+) processors on nodes (\S+) in partition (\S+)", said)
    if found is None:
        return None
    return Size({"cpu": int(found[1]), "node": len(expand_nodes(found[2]))}, found[3])


def parse_associations(text: str) -> list[Association]:
    """Read what ``associations_of`` prints."""
    rows = [line.split("|") for line in text.splitlines()]
    return [
        Association(cluster, user, partition, qos, _counts(together), _counts(most))
        for cluster, user, partition, qos, together, most in (row for row in rows if len(row) == 6)
    ]


def parse_limits(text: str) -> dict[str, Mapping[str, int]]:
    """Read what ``limits_of`` prints: how much of what, by the limit's name."""
    names = [name for name, _ in _OF_QOS]
    rows = [line.split("|") for line in text.splitlines()]
    return next(
        (dict(zip(names, map(_counts, row), strict=True)) for row in rows if len(row) == len(names)), {}
    )


def own_associations(found: Sequence[Association], user: str, partition: str) -> list[Association]:
    """Return those of a user's that count for a job, one for each cluster."""
    own = [one for one in found if one.user == user and one.partition in ("", partition)]
    return list({one.cluster: one for one in sorted(own, key=lambda one: one.partition)}.values())


def over_qos(size: Size, qos: str, limits: Mapping[str, Mapping[str, int]]) -> str | None:
    """Say which limit of a QOS a job of this size never keeps to; None if none."""
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
    """Say which limit of an account it never keeps to; None if there is none.

    A limit of the QOS, which is given, too, counts in place of the account's.
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
    """Read ``cpu=2,node=1``; what has a unit or another name is left out."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: int(count) for name, _, count in pairs if name in _NOUNS and count.isdecimal()}
