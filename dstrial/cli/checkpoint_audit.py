"""``dstrial checkpoint audit``: whether all checkpoints are in their storages."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.streams import size_text
from dstrial.cli.up import add_state_dir_argument
from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory
from dstrial.storage_guard import SAVING_DIRECTORY

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.master.lifecycle.checkpoint_audit import AuditReport

_REPAIR_TIMEOUT_S = 120.0
_POLL_S = 0.2

_EPILOG = """\
Looks at names, sizes, completion marks and manifests of all checkpoints that the master's database lists, whether the master
runs or not; `dstrial checkpoint verify` reads the files of one. Directories that nobody has registered are told with their bytes.
A storage that is not there (an unmounted file system) is told once, and nothing is repaired in it.

--repair has the running master list a checkpoint whose files are gone as deleted, and one without some of them as partially
deleted, so that nothing starts from it. It touches no file.

exit status: 0 if rows and storages agree, 1 if they differ in anything, 2 for wrong usage

examples:
  dstrial checkpoint audit
  dstrial checkpoint audit --json | jq '.findings[] | select(.kind == "missing").uuid'
  dstrial checkpoint audit --repair
  dstrial checkpoint audit --accept /data/checkpoints     # it was moved or replaced on purpose
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action and its arguments."""
    parser = actions.add_parser(
        "audit",
        help="compare all checkpoints that the master lists with what their storages hold",
        description="Compare all checkpoints that the master of this machine lists with what their storages hold.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repair", action="store_true", help="have the master list as deleted what is gone")
    parser.add_argument(
        "--accept",
        metavar="DIR",
        help="take what is at this path now for the storage that was there before, and then look",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    add_state_dir_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Look and print; return 0 if rows and storages agree, else 1.

    Raises:
        MasterError: the database cannot be read, or nobody is there who could repair.
    """
    state = StateDirectory.choose(args.state_dir)
    if args.accept is not None:
        _accept(state, Path(args.accept))
    report = _look(state)
    repaired: list[str] = []
    if args.repair:
        repaired = _repair(state, report)
        report = _look(state) if repaired else report
    if args.as_json:
        sys.stdout.write(json.dumps(_fields(state, report, repaired), indent=2) + "\n")
    else:
        sys.stdout.write(_text(report, repaired))
    return 1 if report.findings else 0


def _look(state: StateDirectory) -> AuditReport:
    from dstrial.master.lifecycle.checkpoint_audit import audit
    from dstrial.master.store.views import observe

    # Twice: what is reported meanwhile is noted no more, and what is begun meanwhile not yet.
    saving = _begun(state)
    known, rows = observe.storages(state)
    return audit(rows, known, saving | _begun(state))


def _begun(state: StateDirectory) -> set[str]:
    """Return the checkpoints that live runs have begun and not reported, by uuid."""
    return {path.name for path in (state.path / "allocations").glob(f"*/{SAVING_DIRECTORY}/*")}


def _accept(state: StateDirectory, path: Path) -> None:
    """Take a directory for the storage that was at its path.

    Raises:
        MasterError: there is no directory, or none was ever used at this path.
    """
    from dstrial.checkpoint.storage_identity import accept_identity, claim_identity
    from dstrial.master.lifecycle.storages import root_of
    from dstrial.master.store.views import observe

    root = path.absolute()
    if not root.is_dir():
        raise MasterError(f"{root} is no directory; expected one to accept. Mount it, or make it.")
    known, rows = observe.storages(state)
    identity = next((one for one in known if Path(one.path) == root), None)
    is_used = any(root_of(json.loads(row.config)["checkpoint_storage"]) == root for row in rows)
    if identity is None and not is_used:
        paths = ", ".join(one.path for one in known) or "none"
        raise MasterError(
            f"{root} is no storage that the master has used; expected one of: {paths}. Name its root."
        )
    try:
        if identity is None:
            claim_identity(root, "")
        elif identity.id is not None:
            accept_identity(identity)
    except OSError as error:
        raise MasterError(
            f"{root} cannot be written to ({error.strerror or error}); expected a directory of your own. "
            "Change the rights on it."
        ) from error


def _repair(state: StateDirectory, report: AuditReport) -> list[str]:
    """Have the master look again at what is not as it lists it; return what was.

    Raises:
        MasterError: no master runs, or it has not done so in time.
    """
    from dstrial.master.login import session

    wanted = sorted({str(one.uuid) for one in report.findings if one.is_repairable})
    if not wanted:
        return []
    record = state.running()
    if record is None:
        raise MasterError(
            f"no master runs with state directory {state.path}; expected one, which alone changes its database. "
            "Start it with `dstrial up`."
        )
    # Without patterns nothing is deleted: the master lists what is there.
    session(record).post("/api/v1/checkpoints/rm", {"checkpointUuids": wanted, "checkpointGlobs": []})
    give_up_at_s = time.monotonic() + _REPAIR_TIMEOUT_S
    while True:
        left = {str(one.uuid) for one in _look(state).findings if one.is_repairable} & set(wanted)
        if not left:
            return wanted
        if time.monotonic() > give_up_at_s:
            raise MasterError(
                f"{len(left)} of {len(wanted)} checkpoints are listed as before after {_REPAIR_TIMEOUT_S:g} s; expected the "
                "master to look at them. See why with `dstrial logs`."
            )
        time.sleep(_POLL_S)


def _fields(state: StateDirectory, report: AuditReport, repaired: list[str]) -> dict[str, Any]:
    return {
        "state_dir": str(state.path),
        "num_checkpoints": report.num_checkpoints,
        "num_bytes": report.num_bytes,
        "num_elsewhere": report.num_elsewhere,
        "storages": list(report.storages),
        "repaired": repaired,
        "findings": [
            {**dataclasses.asdict(one), "is_repairable": one.is_repairable} for one in report.findings
        ],
    }


def _text(report: AuditReport, repaired: list[str]) -> str:
    lines = [f"{finding}\n" for finding in report.findings]
    if repaired:
        lines.append(f"repaired: {len(repaired)} checkpoints are listed as what is there\n")
    if report.num_elsewhere:
        lines.append(f"not looked at: {report.num_elsewhere} checkpoints in storages of other machines\n")
    count, num_storages = report.num_checkpoints, len(report.storages)
    what = (
        f"{count} checkpoint{'' if count == 1 else 's'} in {num_storages} storage{'' if num_storages == 1 else 's'}, "
        f"{size_text(report.num_bytes)}"
    )
    if not report.findings:
        return "".join(lines) + f"{what}: all as listed\n"
    num_repairable = sum(one.is_repairable for one in report.findings)
    hint = f", {num_repairable} of them for `--repair`" if num_repairable else ""
    lines.append(f"{what}: {len(report.findings)} differ{'s' if len(report.findings) == 1 else ''}{hint}\n")
    return "".join(lines)
