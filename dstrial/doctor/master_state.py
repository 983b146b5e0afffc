"""Check that this machine's master responds, and its state directory is valid."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import stat
from pathlib import Path

from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within
from dstrial.errors import MasterError
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

_ANSWER_TIMEOUT_S = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class MasterState:
    """Facts about this machine's master and its state directory."""

    path: str  # the state directory
    record: MasterRecord | None  # None if no master runs
    answer: str = ""  # error in the master's response; empty if the response is correct
    owner: int | None = None  # user id of the directory's owner; None, like the mode, without a directory
    mode: int | None = None
    credentials_mode: int | None = None  # mode of the password file
    error: str = ""  # why the directory cannot be read
    default_port_is_free: bool = True


def measure(state: StateDirectory) -> MasterState:
    try:
        record = state.running()
    except MasterError as error:
        return MasterState(str(state.path), None, error=str(error))
    owner = mode = credentials_mode = None
    with contextlib.suppress(OSError):
        facts = state.path.stat()
        owner, mode = facts.st_uid, stat.S_IMODE(facts.st_mode)
    with contextlib.suppress(OSError):
        credentials_mode = stat.S_IMODE(state.credentials_path.stat().st_mode)
    return MasterState(
        path=str(state.path),
        record=record,
        answer="" if record is None else _answer(record),
        owner=owner,
        mode=mode,
        credentials_mode=credentials_mode,
        default_port_is_free=record is not None or _is_free(daemon.DEFAULT_PORT),
    )


def _answer(record: MasterRecord) -> str:
    """Send a request to a master; return an error text, empty for a correct response."""
    try:
        info = within(_ANSWER_TIMEOUT_S, lambda: Client(record.address).get("/info"))
    except (NoAnswerError, MasterError) as error:
        return str(error)
    is_own = info.get("cluster_id") == record.cluster_id
    return "" if is_own else f"another master answers at {record.address}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((daemon.HOST, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def judge(master: MasterState, *, version: str, accelerator: str) -> list[Finding]:
    """Return findings on the running master and its state directory.

    ``version`` is dstrial's. ``accelerator`` is the kind of slots that a master started now would have.
    """
    if master.error:
        return [problem("state directory", master.error, "Name another directory with --state-dir.")]
    return [*_judge_process(master, version, accelerator), *_judge_directory(master)]


def _judge_process(master: MasterState, version: str, accelerator: str) -> list[Finding]:
    record = master.record
    if record is None:
        if master.default_port_is_free:
            return [ok("master", "does not run; `dstrial up` starts it")]
        what = f"does not run, and another program listens on its port {daemon.DEFAULT_PORT}"
        return [note("master", what, "Start it on another port: `dstrial up --port 0`.")]
    who = f"process {record.pid} at {record.address}"
    if master.answer:
        what = f"{who} does not respond correctly: {master.answer}"
        todo = "See `dstrial logs`; `dstrial down` and `dstrial up` restart it, and trials continue."
        return [problem("master", what, todo)]
    kinds = sorted({str(slot["kind"]) for slot in record.slots})
    found = [ok("master", f"{who} answers; {len(record.slots)} slots ({', '.join(kinds) or 'none'})")]
    anew = "`dstrial down` and `dstrial up` restart it."
    if record.version != version:
        found.append(note("master version", f"{record.version}; this is dstrial {version}", anew))
    if kinds and accelerator not in kinds:
        what = f"{', '.join(kinds)}; a master that started now would offer {accelerator}"
        found.append(note("master slots", what, anew))
    return found


def _judge_directory(master: MasterState) -> list[Finding]:
    name = "state directory"
    if master.owner is None or master.mode is None:
        return [ok(name, f"{master.path}; the first `dstrial up` makes it")]
    found = []
    if master.owner != os.getuid():
        what = f"{master.path} belongs to user id {master.owner}; expected {os.getuid()}"
        found.append(problem(name, what, "Name a directory of your own with --state-dir."))
    elif master.mode & 0o077:
        what = f"{master.path} has mode {master.mode:04o}: other accounts can read it"
        found.append(note(name, what, f"`chmod 700 {master.path}`; the next `dstrial up` does it too."))
    if master.credentials_mode is not None and master.credentials_mode & 0o077:
        file = Path(master.path, "credentials.json")
        det = "det" if master.record is None else f"det -m {master.record.address}"
        what = f"{file} has mode {master.credentials_mode:04o}: other accounts can read the passwords"
        todo = f"`chmod 600 {file}`, and change the passwords (`{det} user change-password`)."
        found.append(problem("credentials", what, todo))
    return found or [ok(name, f"{master.path}, mode {master.mode:04o}")]
