"""This machine's master: whether it runs and answers, and its directory's fitness."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import stat
from pathlib import Path

from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.errors import MasterError
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

_ANSWER_TIMEOUT_S = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class MasterState:
    """What is known of the master.

    Attributes:
        path: its state directory.
        record: the process that serves; None if none does.
        answer: how it answers: empty if as it should, else what is wrong.
        slot_kinds: kinds of the slots that it offers.
        owner: user id that the directory belongs to; None if there is no directory.
        mode: rights on the directory, likewise.
        credentials_mode: rights on the file of passwords; None without one.
        error: why the directory cannot be looked into; empty if it can.
        default_port_is_free: whether a master could listen where it does by default.
    """

    path: str
    record: MasterRecord | None
    answer: str = ""
    slot_kinds: tuple[str, ...] = ()
    owner: int | None = None
    mode: int | None = None
    credentials_mode: int | None = None
    error: str = ""
    default_port_is_free: bool = True


def measure(state: StateDirectory) -> MasterState:
    """Look at a state directory and ask the master that serves it."""
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
        slot_kinds=() if record is None else tuple(str(slot["kind"]) for slot in record.slots),
        owner=owner,
        mode=mode,
        credentials_mode=credentials_mode,
        default_port_is_free=record is not None or _is_free(daemon.DEFAULT_PORT),
    )


def _answer(record: MasterRecord) -> str:
    """Say what is wrong with a master's answer; the caller's thread has the deadline."""
    from dstrial.doctor.background import NoAnswerError, within

    try:
        info = within(_ANSWER_TIMEOUT_S, lambda: Client(record.address).get("/info"))
    except NoAnswerError as error:
        return str(error)
    except MasterError as error:
        return str(error)
    if info.get("cluster_id") != record.cluster_id:
        return f"another master answers at {record.address}"
    return ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((daemon.HOST, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def judge(master: MasterState, *, version: str, accelerator: str) -> list[Finding]:
    """Judge the master.

    ``version`` is that of this dstrial; ``accelerator`` is the kind of slots that a master would offer now, such as ``cuda``.
    """
    if master.error:
        return [problem("state directory", master.error, "Name another directory with --state-dir.")]
    return [*_judge_process(master, version, accelerator), *_judge_directory(master)]


def _judge_process(master: MasterState, version: str, accelerator: str) -> list[Finding]:
    record = master.record
    if record is None:
        if master.default_port_is_free:
            return [ok("master", "does not run; `dstrial up` starts it")]
        return [
            note(
                "master",
                f"does not run, and another program listens on its port {daemon.DEFAULT_PORT}",
                "Start it on another port: `dstrial up --port 0`.",
            )
        ]
    who = f"process {record.pid} at {record.address}"
    if master.answer:
        return [
            problem(
                "master",
                f"{who} does not answer as it should: {master.answer}",
                "`dstrial logs` says what it does; `dstrial down` and `dstrial up` start it anew, and trials go on.",
            )
        ]
    kinds = sorted(set(master.slot_kinds))
    found = [ok("master", f"{who} answers; {len(master.slot_kinds)} slots ({', '.join(kinds) or 'none'})")]
    anew = "`dstrial down` and `dstrial up` start it anew."
    if record.version != version:
        found.append(note("master version", f"{record.version}; this is dstrial {version}", anew))
    if kinds and accelerator not in kinds:
        found.append(
            note(
                "master slots",
                f"{', '.join(kinds)}; a master that started now would offer {accelerator}",
                anew,
            )
        )
    return found


def _judge_directory(master: MasterState) -> list[Finding]:
    if master.owner is None or master.mode is None:
        return [ok("state directory", f"{master.path}; the first `dstrial up` makes it")]
    found = []
    if master.owner != os.getuid():
        found.append(
            problem(
                "state directory",
                f"{master.path} belongs to user id {master.owner}; expected {os.getuid()}",
                "Name a directory of your own with --state-dir.",
            )
        )
    elif master.mode & 0o077:
        found.append(
            note(
                "state directory",
                f"{master.path} has mode {master.mode:04o}: other accounts can look into it",
                f"`chmod 700 {master.path}`; the next `dstrial up` does it too.",
            )
        )
    if master.credentials_mode is not None and master.credentials_mode & 0o077:
        file = Path(master.path, "credentials.json")
        det = "det" if master.record is None else f"det -m {master.record.address}"
        found.append(
            problem(
                "credentials",
                f"{file} has mode {master.credentials_mode:04o}: other accounts can read the passwords",
                f"`chmod 600 {file}`, and change the passwords (`{det} user change-password`).",
            )
        )
    return found or [ok("state directory", f"{master.path}, mode {master.mode:04o}")]
