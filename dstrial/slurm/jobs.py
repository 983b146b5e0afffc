"""Parse jobs and nodes from the output of ``scontrol``, ``squeue`` and ``sinfo``."""

from __future__ import annotations

import dataclasses
import re

from dstrial.slurm.script import notice_s

_SCONTROL_FIELDS = (
    "JobId",
    "JobState",
    "Reason",
    "NodeList",
    "ExitCode",
    "Restarts",
    "PreemptTime",
    "StdOut",
    "StartTime",
)
_FIELDS = ("JobID", "State", "Reason", "PreemptTime", "TimeLeft", "TimeLimit", "NodeList", "Name")
# Commands whose output `parse_queue` and `parse_nodes` read. A job's name may contain any character, so it is the last field.
SQUEUE = ("squeue", "--noheader", "--me", "--states=all", "-O", ",".join(f"{name}:|" for name in _FIELDS))
SINFO = ("sinfo", "--noheader", "--Node", "--exact", "-o", "%N|%T|%c|%G")
_NONE = ("", "None", "Unknown", "N/A", "(null)")  # Slurm's texts for a missing value
# States of a job without nodes, or that will start again.
_WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED", "CONFIGURING")
_RUNNING_STATES = ("RUNNING", "RESIZING", "SUSPENDED", "STOPPED")
# States of a job that will soon lose its nodes; a preempted job may be requeued.
_ENDING_STATES = ("COMPLETING", "SIGNALING", "STAGE_OUT", "PREEMPTED")
# States of a node that can run jobs. An "unknown" node has not registered since the controller's start.
_UP = ("idle", "mixed", "allocated", "completing", "reserved", "planned", "unknown")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A Slurm job, parsed from the output of scontrol or squeue."""

    job_id: str
    state: str  # Slurm's name of the state, for example ``PENDING``
    reason: str = ""  # Slurm's reason why the job waits or has ended; empty if none
    nodes: str = ""  # node list in Slurm's format; empty without nodes
    is_preempted: bool = False  # whether Slurm has preempted the job since its start
    name: str = ""  # this and the next two fields are only from ``squeue``
    left_s: int | None = None  # time until its time limit; None for no limit, or if unknown
    limit: str = ""  # its time limit in Slurm's format
    exit_code: int = 0  # of the batch script; this and the later fields are only from ``scontrol``
    signal: int = 0  # signal that ended the batch script, 0 for none
    num_restarts: int = 0  # how often the job was requeued
    output: str = ""  # path of its output file; empty if unknown
    begins_at: str = ""  # Slurm's planned start; empty if unknown

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING_STATES

    @property
    def is_over(self) -> bool:
        return not self.is_waiting and self.state not in (*_RUNNING_STATES, *_ENDING_STATES)

    @property
    def leaving_reason(self) -> str | None:
        """Why the job will soon lose its nodes; None if it will not, or has no nodes."""
        if self.is_waiting or self.is_over:
            return None
        if self.is_preempted:
            return "is preempted: another job gets its nodes"
        if self.state in _ENDING_STATES:
            return f"is being ended ({self.state.lower()})"
        if self.left_s is not None and self.left_s <= notice_s(self.limit):
            return f"ends at its time limit in {self.left_s} s"
        return None

    @property
    def described(self) -> str:
        """The job's state for users, for example ``running on node1``."""
        text = self.state.lower().replace("_", " ")
        if self.is_waiting:
            return f"{text} ({self.reason})" if self.reason else text
        if not self.is_over:
            return f"{text} on {self.nodes}" if self.nodes else text
        if self.signal or self.exit_code:
            how = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
            return f"{text} ({how})" if self.state == "FAILED" else text
        return f"{text} ({self.reason})" if self.reason else text


def parse_job(text: str) -> Job | None:
    """Parse the output of ``scontrol show job -o``; None if it shows no job."""
    found = {
        name: match[1]
        for name in _SCONTROL_FIELDS
        # A path may contain blanks: a value ends at the next key.
        if (match := re.search(rf"(?:^|\s){name}=(.*?)(?=\s[A-Z][\w/:]*=|\s*$)", text)) is not None
    }
    if not found.get("JobId", "").isdecimal() or "JobState" not in found:
        return None
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    values = {name: "" if value in _NONE else value for name, value in found.items()}
    return Job(
        found["JobId"],
        found["JobState"],
        reason=values.get("Reason", ""),
        nodes=values.get("NodeList", ""),
        exit_code=int(code) if code.isdecimal() else 0,
        signal=int(number) if number.isdecimal() else 0,
        num_restarts=int(found.get("Restarts", "0") or 0),
        is_preempted=bool(values.get("PreemptTime")),
        output=values.get("StdOut", ""),
        begins_at=values.get("StartTime", ""),
    )


def parse_queue(text: str) -> list[Job]:
    """Return the jobs in the output of the command ``SQUEUE``; skip invalid lines."""
    jobs = []
    for line in text.splitlines():
        words = line.strip().removesuffix("|").split("|", len(_FIELDS) - 1)
        if len(words) < len(_FIELDS):
            continue
        job_id, state, reason, preempted, left, limit, nodes, name = (word.strip() for word in words)
        jobs.append(
            Job(
                job_id,
                state,
                reason="" if reason in _NONE else reason,
                nodes=nodes,
                is_preempted=preempted not in _NONE,
                name=name,
                left_s=seconds(left),
                limit=limit,
            )
        )
    return jobs


def seconds(text: str) -> int | None:
    """Convert a time like ``1-02:03:04`` or ``3:04`` to seconds; None for other texts."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _state(text: str) -> str:
    """Strip the flags that ``sinfo`` appends to a node's state."""
    return text.lower().rstrip("~#!%$@^-+")


def is_up(state: str) -> bool:
    """Return whether a node in this state can run jobs."""
    return _state(state) in _UP


def num_gpus(gres: str) -> int:
    """Return the number of GPUs in a list of generic resources (GRES)."""
    return sum(map(int, _GPUS.findall(gres)))


def parse_nodes(text: str, *, wants_devices: bool, cpus_per_task: int = 1) -> dict[str, tuple[int, str]]:
    """Return node name -> (number of slots, state) from the output of ``SINFO``.

    A slot is a GPU if ``wants_devices`` is true, else ``cpus_per_task`` CPUs. Nodes without slots are omitted.
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
