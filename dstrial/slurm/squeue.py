"""Parses ``squeue`` for all jobs of one user, and ``sinfo`` for all nodes; pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from dstrial.slurm.job import WAITING_STATES, explained
from dstrial.slurm.script import OF_CLUSTERS, notice_s

_FIELDS = ("JobID", "State", "Reason", "PreemptTime", "TimeLeft", "TimeLimit", "NodeList", "Name")
SQUEUE = ("squeue", "--noheader", "--me", "--states=all", "-O", ",".join(f"{name}:|" for name in _FIELDS))
"""The command that ``parse_queue`` reads; a name, which may have any letter, is the last field."""
SINFO = ("sinfo", "--noheader", "--Node", "--exact", "-o", "%N|%T|%c|%G")
"""The command that ``parse_nodes`` reads."""
_RUNNING = ("RUNNING", "RESIZING", "SUSPENDED", "STOPPED")
_ENDING = ("COMPLETING", "SIGNALING", "STAGE_OUT")
_ENDED = {
    "CANCELLED": "was cancelled",
    "PREEMPTED": "was ended for another job",
    "NODE_FAIL": "has ended with one of its nodes",
    "TIMEOUT": "has ended at its time limit",
    "DEADLINE": "has ended at its deadline",
    "BOOT_FAIL": "has ended, for a node did not boot",
    "OUT_OF_MEMORY": "has ended, for its memory did not suffice",
    "COMPLETED": "has ended",
}
# Also those that a controller which has just begun knows nothing of yet.
_UP = ("idle", "mixed", "allocated", "completing", "reserved", "planned", "unknown")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedJob:
    """A line of ``squeue``.

    Attributes:
        state: Slurm's word.
        reason: why it waits or has ended, Slurm's words; empty for none.
        is_preempted: whether Slurm has asked it to leave for another job.
        left_s: until its time limit; None for no limit, or if unknown.
        limit: its time limit, as Slurm writes it.
        nodes: Slurm's list of them; empty while it has none.
    """

    job_id: str
    name: str
    state: str
    reason: str = ""
    is_preempted: bool = False
    left_s: int | None = None
    limit: str = ""
    nodes: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def is_over(self) -> bool:
        return not self.is_pending and self.state not in (*_RUNNING, *_ENDING)

    @property
    def why_leaving(self) -> str | None:
        """Return why it loses its nodes soon; None if it keeps them."""
        if self.is_pending or self.is_over:
            return None
        if self.is_preempted:
            return "is preempted: another job gets its nodes"
        if self.state in _ENDING:
            return f"is being ended ({self.state.lower()})"
        if self.left_s is not None and self.left_s <= notice_s(self.limit):
            return f"ends at its time limit in {self.left_s} s"
        return None

    @property
    def text(self) -> str:
        leaving = self.why_leaving
        if leaving is not None:
            return f"job {self.job_id} {leaving}"
        if self.is_over:
            what = _ENDED.get(self.state, f"has ended ({self.state.lower().replace('_', ' ')})")
            return f"job {self.job_id} {what}" + (f" ({self.reason})" if self.reason else "")
        state = self.state.lower().replace("_", " ")
        if self.is_pending:
            return f"job {self.job_id}: {state}" + (f" ({explained(self.reason)})" if self.reason else "")
        return f"job {self.job_id}: {state} on {self.nodes}"


def parse_queue(text: str) -> list[QueuedJob]:
    jobs = []
    for line in text.splitlines():
        words = line.strip().removesuffix("|").split("|", len(_FIELDS) - 1)
        if len(words) < len(_FIELDS):
            continue
        job_id, state, reason, preempted, left, limit, nodes, name = (word.strip() for word in words)
        jobs.append(
            QueuedJob(
                job_id=job_id,
                name=name,
                state=state,
                reason="" if reason in ("None", "(null)") else reason,
                is_preempted=preempted not in ("", "N/A", "None", "Unknown"),
                left_s=seconds(left),
                limit=limit,
                nodes=nodes,
            )
        )
    return jobs


def seconds(text: str) -> int | None:
    """Parse ``1-02:03:04`` or ``3:04``; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _state(text: str) -> str:
    """Strip the marks that ``sinfo`` puts behind a node's state."""
    return text.lower().rstrip("~#!%$@^-+")


def is_up(state: str) -> bool:
    """Return whether a node in this state has jobs, or may begin some."""
    return _state(state) in _UP


def num_gpus(gres: str) -> int:
    """Return how many GPUs a list of generic resources names."""
    return sum(map(int, _GPUS.findall(gres)))


def parse_nodes(text: str, *, wants_devices: bool, cpus_per_task: int = 1) -> dict[str, tuple[int, str]]:
    """Return slots and state by node from the output of ``SINFO``.

    It has a line for each node and partition. Slots are GPUs, or tasks of ``cpus_per_task``.
    """
    found: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        words = line.split("|")
        cpus = re.match(r"\d+", words[2]) if len(words) == 4 else None
        if cpus is None:
            continue
        count = num_gpus(words[3]) if wants_devices else int(cpus[0]) // max(cpus_per_task, 1)
        if count:
            found[words[0]] = (count, words[1])
    return found


def refused_options(options: Sequence[str]) -> list[str]:
    """Return options that would make another job of one that only holds nodes."""
    mine = (
        "--job-name", "-J", "--array", "-a", "--wrap", "--chdir", "-D", "--output", "-o", "--requeue",
        "--wait", "-W", "--parsable", "--test-only", *OF_CLUSTERS,
    )  # fmt: skip
    names = [option.partition("=")[0].partition(" ")[0] for option in options]
    return [
        option
        for option, name in zip(options, names, strict=True)
        if name in mine or (not name.startswith("--") and name[:2] in mine)
    ]
