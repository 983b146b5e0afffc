"""``dstrial status``: show the state of this machine's master."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.streams import add_state_dir_argument, field_lines, print_json
from dstrial.cli.up import describe_slots
from dstrial.errors import DstrialError, MasterError, RequestError
from dstrial.master.backends.status import shown_engine, shown_hosts, shown_servers
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.master.store.views import observe
from dstrial.process_state import is_stopped
from dstrial.visible_text import plural, size_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_ANSWER_TIMEOUT_S = 5.0  # for the master to answer `GET /health`
_UNAVAILABLE = 503  # HTTP status of `/health` while the master has a problem, which the answer names


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status",
        description="Show address, slots, hosts, experiments and disk use of this machine's master. Exit status: 0 if the master "
        "runs; 1 if no master runs, or if the master is stopped by SIGSTOP.",
    )
    add_state_dir_argument(parser)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print the master's state; return 0 if it runs and is not suspended, else 1."""
    state = StateDirectory.choose(args.state_dir)
    record = state.running()
    usage, starting, stalled, unusable = _read_database(state, record)
    stopped = record is not None and is_stopped(record.pid)
    answers, trouble = (False, "") if record is None or stopped else _health(record)
    total, used = 0 if record is None else len(record.slots), usage.num_slots_used
    engine = None if record is None else shown_engine(state.path)
    fields: dict[str, Any] = {
        "running": record is not None,
        "address": None if record is None else record.address,
        "pid": None if record is None else record.pid,
        "stopped": stopped,
        "answers": answers,
        "trouble": trouble or unusable,
        "slots": None if record is None else {"total": total, "used": used, "free": max(0, total - used)},
        "experiments": usage.experiments,
        "trials": usage.trials,
        "starting": starting,
        "stalled": stalled,
        "hosts": [] if record is None else [dataclasses.asdict(one) for one in shown_hosts(state.path)],
        "engine": None if engine is None else dataclasses.asdict(engine),
        "warm": [] if record is None else [dataclasses.asdict(one) for one in shown_servers(state.path)],
        "state_dir": str(state.path),
        "disk_bytes": _disk_bytes(state.path),
    }
    if args.as_json:
        print_json(fields)
    else:
        sys.stdout.write(_text(record, fields))
    return 0 if record is not None and not stopped else 1


def _read_database(
    state: StateDirectory, record: MasterRecord | None
) -> tuple[observe.Usage, list[dict[str, Any]], list[dict[str, Any]], str]:
    """Return (usage, starting trials, stalled trials, error message or "").

    If the database cannot be read and a master runs (``record`` is set), the message says why. Without a master, MasterError is
    raised instead.
    """
    try:
        usage = observe.usage(state)
        starting = [] if record is None else _shown(observe.starting(state), "phase")
        stalled = [] if record is None else _shown(observe.stalled(state), "text")
    except MasterError as error:
        if record is None:
            raise
        return observe.Usage(0, {}, {}), [], [], str(error)
    return usage, starting, stalled, ""


def _shown(found: Sequence[observe.Start | observe.Stalled], key: str) -> list[dict[str, Any]]:
    return [
        {
            "trial": one.trial_id,
            "experiment": one.experiment_id,
            key: one.text,
            "seconds": round(max(time.time() - one.since_s, 0.0), 1),
        }
        for one in found
    ]


def _health(record: MasterRecord) -> tuple[bool, str]:
    try:
        Client(record.address, socket=record.socket, timeout_s=_ANSWER_TIMEOUT_S).get("/health")
    except RequestError as error:
        return True, str(error) if error.status == _UNAVAILABLE else ""
    except DstrialError:
        return False, ""
    return True, ""


def _text(record: MasterRecord | None, fields: dict[str, Any]) -> str:
    if record is None:
        rows = [("master", "not running; start it with `dstrial up`")]
    else:
        slots = fields["slots"]
        rows = [
            ("address", f"{record.address} (process {record.pid})"),
            ("slots", f"{describe_slots(record)}; {slots['used']} used, {slots['free']} free"),
        ]
        if fields["stopped"]:
            way = f"continue it with `kill -CONT {record.pid}`, or end it with `dstrial down`"
            rows.append(("stopped", f"process {record.pid} is stopped (SIGSTOP) and does not respond; {way}"))
        elif not fields["answers"]:
            rows.append(("answers", f"no, not in {_ANSWER_TIMEOUT_S:g} s; see why with `dstrial logs`"))
        if fields["trouble"]:
            rows.append(("trouble", fields["trouble"]))
    for host in fields["hosts"]:
        slots = plural(host["num_slots"], "slot")
        since_s = max(time.time() - host["since_us"] / 1e6, 0.0)
        is_down = "" if host["why_down"] is None else f", down for {since_s:.0f} s: {host['why_down']}"
        rows.append(("host", f"{host['name']}, {slots}{is_down}"))
    rows += [(name, _counts(fields[name])) for name in ("experiments", "trials")]
    if fields["engine"] is not None:
        engine = fields["engine"]
        rows += [(engine["name"].lower(), engine["why_away"])] if engine["why_away"] else []
        rows += [("job", text.removeprefix("job ")) for text in engine["jobs"]]
    for one in fields["starting"]:
        what = f"trial {one['trial']} of experiment {one['experiment']} is {one['phase']}"
        rows.append(("starting", f"{what}, for {one['seconds']:.0f} s"))
    for one in fields["stalled"]:
        where = f"trial {one['trial']} of experiment {one['experiment']}"
        rows.append(("stalled", f"{where}: {one['text']}, for {one['seconds']:.0f} s"))
    for one in fields["warm"]:
        activity = "importing libraries" if one["state"] == "importing" else "trials start as its forks"
        rows.append(("warm", f"process {one['pid']}: {activity}; {one['num_forks']} so far"))
    rows.append(("state", f"{fields['state_dir']} ({size_text(fields['disk_bytes'])})"))
    return field_lines(rows, 13)


def _counts(by_state: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in by_state.items()) or "none"


def _disk_bytes(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # deleted in the meantime
                total += Path(directory, name).lstat().st_blocks * 512
    return total
