"""``dstrial list``, ``show`` and ``kill``: experiments of this machine's master."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrial.cli.streams import add_state_dir_argument, count_argument, field_lines, print_json, text_table
from dstrial.config.diagnostics import dotted
from dstrial.config.experiment_config.hyperparameters import searched_values
from dstrial.errors import RequestError
from dstrial.master.client import Client
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_TRIALS_SHOWN = 100  # rows of `dstrial show`, best first
_ALL = -1  # limit of a page that contains all rows
_ENDED = ("STATE_COMPLETED", "STATE_CANCELED", "STATE_ERROR")
_NOT_FOUND = 404
_DESCRIPTIONS = {
    "list": "List the newest experiments of this machine's master, from `dstrial run` and `det experiment create`.",
    "show": "Show an experiment and its trials, the best trial first.",
    "kill": "End experiments immediately, without a checkpoint. To end an experiment with a checkpoint, use Ctrl-C in "
    "`dstrial run`, or `det experiment pause`.",
}


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser], command: str) -> None:
    parser = subparsers.add_parser(command, description=_DESCRIPTIONS[command])
    if command == "list":
        parser.add_argument(
            "-n",
            "--limit",
            type=functools.partial(count_argument, may_be_zero=False),
            default=20,
            metavar="N",
            help="show only the newest N experiments (default: %(default)s)",
        )
        parser.add_argument("--all", action="store_true", help="show archived experiments, too")
    elif command == "show":
        parser.add_argument("id", type=int, metavar="ID", help="number of the experiment")
    else:
        parser.add_argument("ids", type=int, nargs="+", metavar="ID", help="numbers of the experiments")
    if command != "kill":
        parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    add_state_dir_argument(parser)


def main(args: argparse.Namespace) -> int:
    run: Callable[[Client, argparse.Namespace], int] = {"list": _list, "show": _show, "kill": _kill}[
        args.command
    ]
    from dstrial.master.login import session

    return run(session(StateDirectory.choose(args.state_dir).require_running()), args)


def _list(client: Client, args: argparse.Namespace) -> int:
    query = {"limit": args.limit, "orderBy": "ORDER_BY_DESC", "archived": None if args.all else "false"}
    found = client.get("/api/v1/experiments", **query)["experiments"]
    if args.as_json:
        print_json(found)
        return 0
    reasons = _reasons(client, [one["id"] for one in found])
    rows = [
        (
            str(one["id"]),
            one["name"],
            _state(one),
            _progress(one),
            str(one["numTrials"]),
            _age(one["startTime"]),
            reasons.get(one["id"], ""),
        )
        for one in found
    ]
    header = ("id", "name", "state", "progress", "trials", "started", "reason")
    sys.stdout.write(text_table(header, rows, right=(0, 3, 4)) if rows else "no experiments\n")
    return 0


def _reasons(client: Client, ids: Sequence[int]) -> dict[int, str]:
    """Return experiment id -> why it ended, which Determined's API does not return."""
    found = client.get("/page/experiments", ids=list(ids))["experiments"] if ids else []
    return {one["id"]: one["reason"] for one in found}


def _experiment(client: Client, experiment_id: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]
    except RequestError as error:
        if error.status != _NOT_FOUND:
            raise
        text = f"experiment {experiment_id} is not found; expected one of `dstrial list --all`."
        raise RequestError(error.status, text) from error
    return found


def _show(client: Client, args: argparse.Namespace) -> int:
    experiment = _experiment(client, args.id)
    searcher = experiment["config"].get("searcher", {})
    order = "ORDER_BY_ASC" if searcher.get("smaller_is_better", True) else "ORDER_BY_DESC"
    path = f"/api/v1/experiments/{args.id}/trials"
    limit = _ALL if args.as_json else _TRIALS_SHOWN
    answer = client.get(path, limit=limit, sortBy="SORT_BY_BEST_VALIDATION_METRIC", orderBy=order)
    trials, num_trials = answer["trials"], answer["pagination"]["total"]
    if args.as_json:
        print_json({"experiment": experiment, "trials": trials})
        return 0
    specs = experiment["config"].get("hyperparameters") or {}
    metric = str(searcher.get("metric", ""))
    states = (_state(experiment), _progress(experiment), f"started {_age(experiment['startTime'])}")
    facts = [
        ("experiment", f"{args.id}, {experiment['name']}"),
        ("state", ", ".join(filter(None, states))),
        ("reason", _reasons(client, [args.id])[args.id] or None),
        ("searcher", f"{searcher.get('name', '')}, {metric}"),
    ]
    sys.stdout.write(field_lines(facts, 13))
    rows = [
        (
            str(one["id"]),
            _state(one),
            str(one.get("totalBatchesProcessed", 0)),
            _metric(one.get("bestValidation"), metric),
            _metric(one.get("latestValidation"), metric),
            " ".join(
                f"{dotted(name)}={_value_text(value)}"
                for name, value in searched_values(specs, one["hparams"])
            ),
        )
        for one in trials
    ]
    header = ("trial", "state", "batches", "best", "latest", "hyperparameters")
    sys.stdout.write(text_table(header, rows, right=(0, 2)) if rows else "no trials\n")
    if num_trials > len(trials):
        sys.stdout.write(f"{len(trials)} of {num_trials} trials; --json prints all\n")
    return 0


def _kill(client: Client, args: argparse.Namespace) -> int:
    """Kill experiments; return 1 if the master rejected a request, else 0."""
    exit_code = 0
    for experiment_id in args.ids:
        try:
            found = _experiment(client, experiment_id)
            if found["state"] in _ENDED:
                sys.stdout.write(f"experiment {experiment_id}: already {_state(found)}\n")
                continue
            client.post(f"/api/v1/experiments/{experiment_id}/kill")
            sys.stdout.write(f"experiment {experiment_id}: killed\n")
        except RequestError as error:
            sys.stderr.write(f"{error}\n")
            exit_code = 1
    return exit_code


def _state(one: Mapping[str, Any]) -> str:
    return str(one["state"]).removeprefix("STATE_").lower()


def _progress(one: Mapping[str, Any]) -> str:
    if one["state"] in ("STATE_ERROR", "STATE_CANCELED"):
        return ""
    done = 1.0 if one["state"] == "STATE_COMPLETED" else one.get("progress") or 0.0
    return f"{100 * done:.0f} %"


def _metric(validation: Mapping[str, Any] | None, name: str) -> str:
    value = ((validation or {}).get("metrics") or {}).get("avgMetrics", {}).get(name)
    return "" if value is None else _value_text(value)


def _value_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _age(started: str) -> str:
    passed = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(
        started.replace("Z", "+00:00")
    )
    seconds = max(int(passed.total_seconds()), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"
