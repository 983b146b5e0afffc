"""Slurm's commands, with timeouts: they wait for minutes for a controller."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dstrial.errors import LaunchError, NodesDownError, NodesUnknownError
from dstrial.slurm import limits
from dstrial.slurm.job import Job, parse_job
from dstrial.slurm.node_resources import NODES, missing_nodes, parse_node_resources
from dstrial.slurm.script import options_of, value_of

_TIMEOUT_S = 30.0
_PARTITION = "Name one that `sinfo` lists (--partition=NAME in slurm.sbatch_args, or behind --sbatch-arg=)."
_ACCOUNT = (
    "Name an account that may use the partition (--account=NAME in slurm.sbatch_args, or behind --sbatch-arg=); "
    "`sacctmgr show assoc user=$USER format=Account,Partition,QOS` lists yours."
)
_QOS = (
    "Name one that your account has (--qos=NAME in slurm.sbatch_args, or behind --sbatch-arg=); "
    "`sacctmgr show assoc user=$USER format=Account,Partition,QOS` lists them."
)
_LIMITS = (
    "Ask for less, or name another QOS or account (--qos=NAME, --account=NAME in slurm.sbatch_args, or behind --sbatch-arg=); "
    "`sacctmgr show qos format=Name,GrpTRES,MaxTRES,MaxTRESPU,MaxTRESPA,MaxWall` lists what they allow."
)
_FULL_QUEUE = "Wait until jobs of yours have ended (`squeue --me`), or name another QOS or account, whose queue has room."
_TOO_LARGE = "Ask for fewer slots, fewer on one node, or another partition: none has so much (`sinfo -o '%P %D %c %G'`)."
_NODES = "Ask for fewer nodes: the partition has fewer, or lets a job have fewer (`sinfo -o '%P %D'`)."
_WAIT = "Wait until it is back, or ask who runs the cluster; `scontrol ping` says how it is."
# What sbatch says (Slurm 20.11 to 25, src/common/slurm_errno.c), and what to do.
_FIXES = (
    ("invalid partition", _PARTITION),
    ("no partition specified", _PARTITION),
    ("invalid account", _ACCOUNT),
    ("invalid qos", _QOS),
    ("submitjob", _FULL_QUEUE),
    ("violates accounting/qos policy", _LIMITS),
    ("node configuration is not available", _TOO_LARGE),
    ("node count specification invalid", _NODES),
    ("more processors requested than permitted", "Ask for fewer slots, or another partition (`sinfo -o '%P %D %c'`)."),
    ("cpu count per node can not be satisfied", "Ask for fewer slots on one node (`sinfo -o '%P %D %c'`)."),
    ("memory specification can not be satisfied", "Ask for less memory (`sinfo -o '%P %m'`)."),
    ("generic resource", "Ask for accelerators that the partition has (`sinfo -o '%P %G'`)."),
    ("requested time limit", "Ask for less time (`sinfo -o '%P %l'`)."),
    ("invalid feature", "Correct the --constraint (`sinfo -o '%P %f'`)."),
    ("unrecognized option", "Correct slurm.sbatch_args; `man sbatch` lists all options."),
    ("contact slurm controller", _WAIT),
    ("socket timed out", _WAIT),
)  # fmt: skip

_AWAY = (
    "contact slurm controller",
    "socket timed out",
    "has not answered for",
    "connection refused",
    "unable to connect",
    "zero bytes were transmitted",
    "slurm backup controller in standby",
)
_IMPOSSIBLE = "node configuration is not available"
# What a controller says, too, that has just begun: it knows nothing of its nodes for some seconds.
_NOT_YET = (
    _IMPOSSIBLE,
    "node count specification invalid",
    "more processors requested than permitted",
    "cpu count per node can not be satisfied",
    "memory specification can not be satisfied",
    "generic resource",
)
# What may be otherwise when the job is really asked for, or is only waited for in the queue.
_FOR_NOW = (
    "required partition not available",
    "required node not available",
    "requested nodes are busy",
    "temporarily unable",
)
_POLICY = "violates accounting/qos policy"
# The limit that sbatch names before: of jobs in the queue, as QOSMaxSubmitJobPerUserLimit, or of the job itself.
_NAMED_LIMIT = re.compile(r"\b(?:qos|assoc)(?:max|grp|min)(?!\w*submitjob)\w+")
_LOOK_S = 10.0
"""For so long Slurm may look at a job before it is submitted, and then at its nodes, seconds."""
PATIENCE_S = 60.0
"""For so long Slurm is asked again where it does not answer, and as long once more until it knows its nodes, seconds."""
_AGAIN_S = 2.0
_MOST_LOOKS = 4
"""So often at most nodes are looked at which change between two looks."""
_NODE_STATES = ("sinfo", "--noheader", "--Node", "-o", "%T")
T = TypeVar("T")


def require_slurm(*names: str, or_else: str = "leave --slurm out to train here") -> None:
    """Refuse a machine without these commands; ``or_else`` ends the message."""
    absent = [name for name in names if shutil.which(name) is None]
    if absent:
        raise LaunchError(
            f"{', '.join(absent)} of Slurm is not on PATH; expected a machine from which jobs are submitted. Run the command "
            f"on a login node of the cluster, load its module (`module load slurm`), or {or_else}."
        )


def run_slurm(
    words: Sequence[str], *, cwd: Path | None = None, timeout_s: float = _TIMEOUT_S
) -> tuple[int, str, str]:
    """Run one of Slurm's commands; return exit code (124: timeout), output and errors."""
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=environ,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{words[0]} has not answered for {timeout_s:g} s"
    except OSError as error:
        return 127, "", f"{words[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


def submit(script: Path, *, may_wait: bool = False) -> int:
    """Queue a batch script; return the job's number.

    ``may_wait`` queues it even if nodes that it needs are down or drained.

    Raises:
        NodesUnknownError: Slurm refuses it, and does not know all its nodes yet.
        NodesDownError: nodes that it needs are down or drained.
        LaunchError: Slurm refuses it, would never start it, or has given it to another cluster.
    """
    # Without this a job that no partition could ever hold waits for ever, where Slurm does not enforce limits.
    _, output, errors, down = _ask_for_test(script)
    if _IMPOSSIBLE in f"{output}{errors}".lower():
        if not down:
            raise LaunchError(refused(errors or output, str(script)))
        if not may_wait:
            raise NodesDownError(
                f"the job needs nodes that are down or drained ({', '.join(down)}); expected enough that are up. Wait until they "
                "are back (`sinfo -R` says why they are not), or ask for fewer slots."
            )
    over = _over_limits(script, f"{output}{errors}")
    if over is not None:
        raise LaunchError(f"Slurm would never start the job; {over}. {_LIMITS}")
    code, output, errors = _ask_sbatch("--parsable", script)
    number, _, cluster = output.strip().partition(";")
    if code or not number.isdecimal():
        raise LaunchError(refused(errors or output, str(script)))
    if cluster and cluster != os.environ.get("SLURM_CLUSTERS"):  # Which squeue and the others ask, too.
        words = ["scancel", f"--clusters={cluster}", number]
        code, _, _ = run_slurm(words)
        raise LaunchError(
            f"Slurm has given job {number} to cluster {cluster}; expected the cluster of this machine, where squeue and scancel "
            "look for it. Leave out --clusters, and unset SBATCH_CLUSTERS. "
            + (f"`{' '.join(words)}` ends the job." if code else "The job is cancelled.")
        )
    return int(number)


def submit_patiently(script: Path, tell: Callable[[str], object]) -> int:
    """Queue a batch script like :func:`submit`; retry if a refusal may be over soon.

    ``tell`` hears once that Slurm is asked again, and why. Earlier jobs of a run that goes on had the same script.
    """
    before: frozenset[int] | None = None

    def ask() -> int:
        nonlocal before
        words = ["squeue", "--noheader", "--me", "--states=all", "-O", "JobID:|,Command:|"]
        code, output, errors = run_slurm(words)
        if code and is_away(errors):
            raise LaunchError(f"Slurm does not answer; {why_away(errors, 'squeue', code)}. {_WAIT}")
        there = queued_as(output, str(script))
        if before is None:  # of the run that goes on, most likely ended
            before = there
        # An answer to an earlier question may have been lost.
        return max(there - before) if there - before else submit(script, may_wait=True)

    return patiently(ask, tell)


def patiently(ask: Callable[[], T], tell: Callable[[str], object]) -> T:
    """Retry ``ask`` while Slurm is away or lacks its nodes; raise the last refusal.

    ``ask`` raises ``LaunchError`` with Slurm's message; ``tell`` hears once that Slurm is asked again, and why.
    """
    give_up_at_s = time.monotonic() + PATIENCE_S
    is_told, was_away = False, False
    while True:
        try:
            return ask()
        except LaunchError as error:
            if was_away and not is_away(str(error)):  # Its nodes are given as long to register.
                give_up_at_s = time.monotonic() + PATIENCE_S
            was_away = is_away(str(error))
            if time.monotonic() >= give_up_at_s or not is_transient(error):
                raise
            if not is_told:
                tell(f"Slurm is asked again for up to {PATIENCE_S:g} s: {error}")
                is_told = True
        time.sleep(_AGAIN_S)


def is_transient(error: LaunchError) -> bool:
    """Return whether Slurm may accept soon what it refuses now."""
    return isinstance(error, NodesUnknownError) or is_away(str(error))


def _ask_sbatch(option: str, script: Path, timeout_s: float = 2 * _TIMEOUT_S) -> tuple[int, str, str]:
    """Run sbatch; return its exit code, output and errors.

    A refusal that a controller without its nodes gives, too, counts if all nodes had registered before.

    Raises:
        NodesUnknownError: they have not.
    """
    has_looked = False
    while True:
        code, output, errors = run_slurm(["sbatch", option, str(script)], timeout_s=timeout_s)
        if has_looked or not is_not_yet(f"{output}{errors}"):
            return code, output, errors
        if has_unknown_nodes(timeout_s):
            raise NodesUnknownError(refused(errors or output, str(script)))
        has_looked = True  # The last of them may have registered after the refusal.


def is_not_yet(said: str) -> bool:
    """Return whether a controller without its nodes gives such a refusal. Pure."""
    return any(words in said.lower() for words in _NOT_YET)


def has_unknown_nodes(timeout_s: float = _TIMEOUT_S) -> bool:
    """Return whether nodes are unknown, or have not registered yet.

    They do within seconds, or are down later.
    """
    code, output, _ = run_slurm(list(_NODE_STATES), timeout_s=timeout_s)
    return code != 0 or any(line.strip().lower().startswith("unknown") for line in output.splitlines())


def queued_as(text: str, script: str) -> frozenset[int]:
    """Return the jobs of a batch script in squeue's list of jobs and commands. Pure."""
    found = (line.strip().removesuffix("|").partition("|") for line in text.splitlines())
    return frozenset(
        int(number)
        for number, _, command in found
        if command.strip() == script and number.strip().isdecimal()
    )


def test(script: Path) -> None:
    """Check, without a job, that Slurm would accept a batch script.

    Raises:
        NodesUnknownError: it would not, and does not know all its nodes yet.
        LaunchError: it would not.
    """
    code, output, errors, down = _ask_for_test(script)
    if code and not down:
        raise LaunchError(refused(errors or output, str(script)))


def _ask_for_test(script: Path, timeout_s: float = 2 * _TIMEOUT_S) -> tuple[int, str, str, list[str]]:
    """Have sbatch check a job; return its messages, and missing nodes.

    Missing nodes are the down or drained ones of a job that sbatch calls impossible. If a node changes during the check, the
    check is repeated.

    Raises:
        NodesUnknownError: they have not all registered.
    """
    nodes: str | None = None
    code, output, errors = _ask_sbatch("--test-only", script, timeout_s)
    for _ in range(_MOST_LOOKS):
        if _IMPOSSIBLE not in f"{output}{errors}".lower():
            return code, output, errors, []
        before = nodes
        failed, nodes, _ = run_slurm(list(NODES), timeout_s=_LOOK_S)
        if failed or nodes == before:
            break
        code, output, errors = run_slurm(["sbatch", "--test-only", str(script)], timeout_s=timeout_s)
    options = _options_in(script)
    # sbatch takes the environment before the script.
    partitions = os.environ.get("SBATCH_PARTITION") or value_of(options, "--partition", "-p")
    return code, output, errors, missing_nodes(options, parse_node_resources(nodes or "", partitions))


def _options_in(script: Path) -> list[str]:
    """Return the options of a script; empty if it is unreadable."""
    try:
        return options_of(script.read_text(encoding="utf-8"))
    except OSError:
        return []


def _over_limits(script: Path, said: str) -> str | None:
    """Return which limit keeps a job from ever starting; None if unknown.

    Slurm reports it only when the job waits, unless the QOS has ``DenyOnLimit``. ``said`` are messages of ``sbatch
    --test-only``.
    """
    size = limits.size_of(said)
    if size is None or shutil.which("sacctmgr") is None:
        return None

    def ask(words: Sequence[str]) -> str:
        code, output, _ = run_slurm(words, timeout_s=_LOOK_S)
        return "" if code else output  # There is no accounting, it is away, or keeps it from us.

    options = _options_in(script)
    user = pwd.getpwuid(os.getuid()).pw_name
    # sbatch takes the environment before the script.
    account = os.environ.get("SBATCH_ACCOUNT") or value_of(options, "--account", "-A")
    account = account or ask(limits.default_account_of(user)).strip()
    if not account:
        return None
    found = limits.parse_associations(ask(limits.associations_of(account)))
    given = os.environ.get("SBATCH_QOS") or value_of(options, "--qos", "-q")
    over: list[str | None] = []
    for own in limits.own_associations(found, user, size.partition):
        qos = given or own.qos
        allowed = limits.parse_limits(ask(limits.limits_of(qos))) if qos else {}
        there = [one for one in found if one.cluster == own.cluster]
        over.append(
            limits.over_qos(size, qos, allowed) or limits.over_account(size, account, user, there, allowed)
        )
    # The accounts of several clusters may be kept in one place: which one this is is not asked.
    return f"sacctmgr says: {over[0]}" if over and all(over) else None


def why_never(script: Path) -> tuple[str, str] | None:
    """Return Slurm's reason why a script never starts, and a fix; None if it may.

    Raises:
        ConnectionError: Slurm does not answer, or does not know its nodes yet.
    """
    try:
        code, output, errors, down = _ask_for_test(script, _LOOK_S)
    except NodesUnknownError as error:
        raise ConnectionError("its nodes are not known yet") from error
    text = errors or output
    said = text.lower()
    if code < 0 or code == 127 or (code and is_away(said)):
        raise ConnectionError(why_away(text, "sbatch", code))
    if down:
        return None
    if is_refusal(code, said):
        fix = fix_for(said) or "Correct it, or ask who runs the cluster."
        return f"sbatch says: {words_of(text)}", fix
    over = _over_limits(script, f"{output}{errors}")
    return None if over is None else (over, _LIMITS)


def is_refusal(code: int, said: str) -> bool:
    """Return whether ``sbatch --test-only`` has refused a job for good. Pure."""
    words = said.lower()
    is_for_now = any(one in words for one in _FOR_NOW) or (
        _POLICY in words and _NAMED_LIMIT.search(words) is None
    )
    return (code != 0 or _IMPOSSIBLE in words) and not is_for_now


def is_full(said: str) -> bool:
    """Return whether sbatch refuses because the user has too many jobs queued. Pure."""
    return _POLICY in said.lower() and not is_refusal(1, said)


def is_away(said: str) -> bool:
    """Return whether a message means that Slurm does not answer. Pure."""
    return any(words in said.lower() for words in _AWAY)


def why_away(said: str, command: str, code: int) -> str:
    """Return why a query has failed, in one line. Pure."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in said.splitlines() if line.strip()]
    return f"{command} says: {'; '.join(lines)}" if lines else f"{command} ended with {code}"


def refused(errors: str, script: str) -> str:
    """Return an error text for sbatch's refusal of a script. Pure."""
    said = words_of(errors)
    return f"Slurm does not take the job; sbatch says: {said}. {fix_for(said) or f'Look at {script}.'}"


def words_of(errors: str) -> str:
    """Return sbatch's messages in one line. Pure."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return "; ".join(re.sub(r"^(sbatch: )?(error: )?", "", line) for line in lines) or "nothing"


def fix_for(said: str) -> str | None:
    """Return what to do about sbatch's message; None if unknown. Pure."""
    return next((fix for words, fix in _FIXES if words in said.lower()), None)


def job_of(job_id: int) -> Job | None:
    """Return a job by Slurm's controller; None if the controller has forgotten it.

    Raises:
        ConnectionError: it does not answer.
    """
    code, output, errors = run_slurm(["scontrol", "show", "job", "-o", str(job_id)])
    job = parse_job(output)
    if job is None and not (code and "invalid job id" in errors.lower()):
        raise ConnectionError((errors or output).strip() or f"exit code {code}")
    return job


def requeue(job_id: int) -> str:
    """Requeue a running job, which ends it; return why that is refused, or ""."""
    code, output, errors = run_slurm(["scontrol", "requeue", str(job_id)])
    return (errors or output).strip() if code else ""


def cancel(job_id: int, *, signal_name: str = "") -> str:
    """Cancel a job, or signal its batch script; return why that is refused, or ""."""
    options = [f"--signal={signal_name}", "--batch"] if signal_name else []
    code, output, errors = run_slurm(["scancel", *options, str(job_id)])
    return (errors or output).strip() if code else ""


def has_devices(partition: str | None) -> bool:
    """Return whether a partition, or the default one, has nodes with GPUs."""
    options = ["--partition", partition] if partition else []
    _, output, _ = run_slurm(["sinfo", "-h", "-o", "%P|%G", *options])
    rows = [line.split("|", 1) for line in output.splitlines() if "|" in line]
    return any("gpu" in gres for name, gres in rows if partition or name.endswith("*"))
