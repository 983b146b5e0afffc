"""Run Slurm's commands with a timeout, and explain their error messages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dstrial.errors import LaunchError
from dstrial.slurm.jobs import Job, parse_job

_TIMEOUT_S = 30.0  # Slurm's commands wait for minutes for a controller
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
_TOO_LARGE = (
    "Ask for fewer slots, fewer on one node, or another partition: none has so much (`sinfo -o '%P %D %c %G'`). If Slurm has "
    "just started, try again in a minute: it does not know its nodes yet."
)
_NODES = "Ask for fewer nodes: the partition has fewer, or lets a job have fewer (`sinfo -o '%P %D'`)."
_WAIT = "Wait until it is back, or ask who runs the cluster; `scontrol ping` says how it is."
# Parts of sbatch's messages (Slurm 20.11 to 25, src/common/slurm_errno.c), and the fix for each.
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

# Parts of messages which mean that the controller is unreachable.
_UNREACHABLE = (
    "contact slurm controller",
    "socket timed out",
    "has not answered for",
    "connection refused",
    "unable to connect",
    "zero bytes were transmitted",
    "slurm backup controller in standby",
)
_IMPOSSIBLE = "node configuration is not available"  # rejects the job, even if --test-only exits with 0
# Rejections because no nodes, or too few nodes, have the resources that a job requests.
_NODES_MISSING = (
    _IMPOSSIBLE,
    "node count specification invalid",
    "more processors requested than permitted",
    "cpu count per node can not be satisfied",
    "memory specification can not be satisfied",
    "generic resource",
)
# Rejections by --test-only that are temporary: a real job would wait in the queue.
_TEMPORARY = (
    "required partition not available",
    "required node not available",
    "requested nodes are busy",
    "temporarily unable",
)
# Such a rejection is permanent only if the message also names a limit on the job itself.
_POLICY = "violates accounting/qos policy"
# Name of the limit in such a message: one on the job itself, not on the number of queued jobs (QOSMaxSubmitJobPerUserLimit).
_NAMED_LIMIT = re.compile(r"\b(?:qos|assoc)(?:max|grp|min)(?!\w*submitjob)\w+")
_CHECK_S = 10.0  # timeout of a check whose result the user waits for


def require_slurm(*names: str, or_else: str = "leave --slurm out to train here") -> None:
    """Raise LaunchError unless the commands ``names`` are on PATH.

    ``or_else`` is an alternative for the user, with which the message ends.
    """
    absent = [name for name in names if shutil.which(name) is None]
    if absent:
        raise LaunchError(
            f"{', '.join(absent)} of Slurm is not on PATH; expected a machine from which jobs are submitted. Run the command "
            f"on a login node of the cluster, load its module (`module load slurm`), or {or_else}."
        )


def run_slurm(words: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> tuple[int, str, str]:
    """Run a Slurm command; return (exit code, stdout, stderr).

    The exit code is 124 after a timeout, and 127 if the command cannot be started.
    """
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    environ.pop("SBATCH_CLUSTERS", None)  # squeue and scancel would look for the job elsewhere
    try:
        done = subprocess.run(
            words,
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


def submit(script: Path) -> int:
    """Submit a batch script; return the job id.

    Raises:
        LaunchError: Slurm rejects the script or does not answer.
    """
    # If Slurm does not enforce limits, it queues a job that no partition can run, for ever. --test-only rejects it.
    test(script)
    code, output, errors = run_slurm(["sbatch", "--parsable", str(script)], timeout_s=2 * _TIMEOUT_S)
    number = output.strip().partition(";")[0]  # with SLURM_CLUSTERS, the cluster follows
    if code or not number.isdecimal():
        raise LaunchError(refused(errors or output, str(script)))
    return int(number)


def lacks_nodes(message: str) -> bool:
    """Return whether sbatch's error message means that no nodes fit the job."""
    return any(words in message.lower() for words in _NODES_MISSING)


def test(script: Path) -> None:
    """Check that Slurm would accept a batch script, by ``sbatch --test-only``.

    Raises:
        LaunchError: Slurm rejects the script or does not answer.
    """
    code, text = _test(script, 2 * _TIMEOUT_S)
    if is_refusal(code, text):
        raise LaunchError(refused(text, str(script)))


def rejection_of(script: Path) -> tuple[str, str] | None:
    """Return (reason, fix) if Slurm rejects a batch script, else None.

    Return None also for a temporary rejection, for example because nodes are busy: the job would wait in the queue.

    Raises:
        ConnectionError: Slurm does not answer.
    """
    code, text = _test(script, _CHECK_S)
    if code < 0 or code == 127 or (code and is_away(text)):
        raise ConnectionError(failure_reason(text, "sbatch", code))
    if not is_refusal(code, text):
        return None
    return f"sbatch says: {one_line(text)}", fix_for(text) or "Correct it, or ask who runs the cluster."


def _test(script: Path, timeout_s: float) -> tuple[int, str]:
    code, output, errors = run_slurm(["sbatch", "--test-only", str(script)], timeout_s=timeout_s)
    return code, errors or output


def is_refusal(code: int, message: str) -> bool:
    """Return whether ``sbatch --test-only`` has rejected a job permanently.

    ``code`` and ``message`` are the exit code and output of the command.
    """
    words = message.lower()
    is_temporary = any(one in words for one in _TEMPORARY) or (
        _POLICY in words and _NAMED_LIMIT.search(words) is None
    )
    return (code != 0 or _IMPOSSIBLE in words) and not is_temporary


def is_away(message: str) -> bool:
    """Return whether a message means that Slurm is unreachable."""
    return any(words in message.lower() for words in _UNREACHABLE)


def failure_reason(message: str, command: str, code: int) -> str:
    """Return why a Slurm command has failed, as one line for an error message.

    The line has the command's output ``message`` or, if ``message`` is empty, its exit code.
    """
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in message.splitlines() if line.strip()]
    return f"{command} says: {'; '.join(lines)}" if lines else f"{command} ended with {code}"


def refused(errors: str, script: str) -> str:
    """Return an error message for users from sbatch's output on a rejected script.

    ``errors`` is the output. ``script`` is the path of the script, which the message names if there is no known fix.
    """
    message = one_line(errors)
    return f"Slurm rejects the job; sbatch says: {message}. {fix_for(message) or f'Look at {script}.'}"


def one_line(errors: str) -> str:
    """Join sbatch's error messages into one line, without prefixes; "nothing" if none."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return "; ".join(re.sub(r"^(sbatch: )?(error: )?", "", line) for line in lines) or "nothing"


def fix_for(message: str) -> str | None:
    """Return how a user can fix an error that sbatch reports; None if unknown."""
    return next((fix for words, fix in _FIXES if words in message.lower()), None)


def job_of(job_id: int) -> Job | None:
    """Return a Slurm job from ``scontrol``; None if the controller has no such job.

    Raises:
        ConnectionError: the controller does not answer.
    """
    code, output, errors = run_slurm(["scontrol", "show", "job", "-o", str(job_id)])
    job = parse_job(output)
    if job is None and not (code and "invalid job id" in errors.lower()):
        raise ConnectionError((errors or output).strip() or f"exit code {code}")
    return job


def requeue(job_id: int) -> str:
    """Requeue a running job, which kills its processes.

    Return Slurm's error message; "" after success.
    """
    code, output, errors = run_slurm(["scontrol", "requeue", str(job_id)])
    return (errors or output).strip() if code else ""


def cancel(job_id: int, *, signal_name: str = "") -> str:
    """Cancel a job or, if ``signal_name`` is given, only signal its batch script.

    Return Slurm's error message; "" after success.
    """
    options = [f"--signal={signal_name}", "--batch"] if signal_name else []
    code, output, errors = run_slurm(["scancel", *options, str(job_id)])
    return (errors or output).strip() if code else ""


def has_devices(partition: str | None) -> bool:
    """Return whether a partition has nodes with GPUs.

    ``partition`` None or "" means the default partition. Return False if Slurm does not answer.
    """
    options = ["--partition", partition] if partition else []
    _, output, _ = run_slurm(["sinfo", "-h", "-o", "%P|%G", *options])
    rows = [line.split("|", 1) for line in output.splitlines() if "|" in line]
    return any("gpu" in gres for name, gres in rows if partition or name.endswith("*"))
