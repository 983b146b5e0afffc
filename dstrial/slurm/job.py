"""What ``scontrol show job`` says of a job."""

from __future__ import annotations

import dataclasses
import re

_NONE = ("", "None", "Unknown", "N/A", "(null)")
WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED", "CONFIGURING")
"""Of a job that has no nodes, or may begin again."""
ACTIVE_STATES = (
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "PREEMPTED",
)
"""Of a job that has nodes or is about to leave them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job as Slurm's controller sees it.

    Attributes:
        state: Slurm's word, ``PENDING`` for example.
        reason: why it waits or has ended, Slurm's word; empty for none.
        nodes: Slurm's list of its nodes; empty while it has none.
        exit_code: of its batch script.
        signal: that ended it, 0 for none.
        num_restarts: how often it was requeued.
        is_preempted: whether Slurm has asked it to leave for another job since it began.
        output: path of its output; empty if unknown.
        begins_at: Slurm's planned start; empty if unknown.
    """

    job_id: int
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    signal: int = 0
    num_restarts: int = 0
    is_preempted: bool = False
    output: str = ""
    begins_at: str = ""

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def is_over(self) -> bool:
        return not self.is_waiting and self.state not in ACTIVE_STATES

    @property
    def described(self) -> str:
        """State for people: ``pending (Resources)``."""
        text = self.state.lower().replace("_", " ")
        if self.is_waiting and self.reason:
            text += f" ({explained(self.reason)})"
        elif self.state == "FAILED":
            text += f" (signal {self.signal})" if self.signal else f" (exit code {self.exit_code})"
        elif not self.is_over and self.nodes:
            text += f" on {self.nodes}"
        return text


def parse_job(text: str) -> Job | None:
    """Parse the line of ``scontrol show job -o``; None if it is none. Pure."""
    found = {
        name: match[1]
        for name in _NAMES
        # A path may have blanks: a value ends where another key begins.
        if (match := re.search(rf"(?:^|\s){name}=(.*?)(?=\s[A-Z][\w/:]*=|\s*$)", text)) is not None
    }
    if not found.get("JobId", "").isdecimal() or "JobState" not in found:
        return None
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    values = {name: "" if value in _NONE else value for name, value in found.items()}
    return Job(
        int(found["JobId"]),
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


_NAMES = (
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
# Slurm's words (squeue(1), "JOB REASON CODES") that a person would have to look up.
_EXPLAINED = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs of a higher priority",
    "BeginTime": "may not begin yet",
    "Dependency": "waits for another job",
    "JobHeldUser": "held by its user; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs to run",
    "PartitionConfig": "asks for more than its partition has",
    "PartitionNodeLimit": "asks for more nodes than its partition has or lets a job have",
    "PartitionTimeLimit": "asks for more time than its partition lets a job have",
    "QOSMaxJobsPerUserLimit": "its user has as many jobs as may run at once",
    "AssocMaxJobsLimit": "its account has as many jobs as may run at once",
}
_NEVER = (
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "BadConstraints",
    "AccountNotAllowed",
    "QOSNotAllowed",
)
# As QOSMaxCpuPerUserLimit and AssocGrpCPUMinutesLimit.
_LIMIT = re.compile(r"(QOS|Assoc)(?:Max|Grp)\w+")


def is_for_ever(reason: str) -> bool:
    """Return whether a job with this reason waits until something changes. Pure."""
    return reason.partition(",")[0] in _NEVER or (_LIMIT.fullmatch(reason) is not None and "PerJob" in reason)


def explained(reason: str) -> str:
    """Return Slurm's reason with its meaning. Pure."""
    told = _EXPLAINED.get(reason.partition(",")[0]) or _limit_text(reason)
    return reason if told is None else f"{reason}: {told}"


def _limit_text(reason: str) -> str | None:
    """Return the meaning of a limit of an account or a QOS; None for another reason."""
    found = _LIMIT.fullmatch(reason)
    if found is None:
        return None
    whose = "its QOS" if found[1] == "QOS" else "its account"
    if "PerJob" in reason or reason.endswith("PerNode"):
        return f"asks for more than {whose} lets a job have"
    if "Minutes" in reason:
        return f"waits until {whose} has time to give again"
    if "PerUser" in reason:
        return f"its user has as much as {whose} lets a user have at once"
    return f"waits for jobs of {whose} to end, which have as much as they may together"
