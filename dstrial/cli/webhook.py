"""``dstrial webhook``: create, list, test and delete webhooks."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dstrial.cli.streams import add_state_dir_argument, det_for, text_table
from dstrial.errors import MasterError, RequestError
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_HEADER = [
    "ID",
    "Name",
    "Events",
    "Workspace",
    "Format",
    "URL",
    "Sent",
    "Failed",
    "Dropped",
    "Waiting",
    "Last",
    "Result",
]
_NUMBERS = (6, 7, 8, 9)  # columns with numbers
_EPILOG = """\
Requests are signed. The header X-Determined-AI-Signature is an HMAC-SHA256 in hexadecimal digits, with the key that
`dstrial webhook key` prints. The signed text is the header X-Determined-AI-Signature-Timestamp, a comma and the body.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "webhook",
        description="Have the master of this machine send an HTTP request when an experiment ends, a log line matches, or a "
        "trial calls core_context.alert().",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="create a webhook; by default for the states COMPLETED and ERROR"
    )
    create.add_argument("name", help="name to use in experiment configs")
    create.add_argument("url", help="http or https URL")
    create.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STATE",
        help="send when an experiment reaches this state; repeatable",
    )
    create.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="REGEX",
        help="send the first log line of each task that matches REGEX; repeatable",
    )
    create.add_argument(
        "--alert",
        action="store_true",
        help="send alerts (core_context.alert()) of experiments whose config names the webhook",
    )
    create.add_argument(
        "--specific",
        action="store_true",
        help="send events only of experiments whose config names the webhook (integrations.webhooks); implied by --alert",
    )
    create.add_argument(
        "--workspace", metavar="NAME", help="send events only of this workspace (default: all)"
    )
    create.add_argument("--slack", action="store_true", help="send messages in Slack's format")
    listing = actions.add_parser("list", help="list webhooks with their delivery status")
    listing.add_argument("--json", action="store_true", dest="as_json", help="print a JSON list")
    delete = actions.add_parser("delete", help="delete a webhook and its pending events")
    trial = actions.add_parser("test", help="send a test event now and report the result")
    for action in (delete, trial):
        action.add_argument("id", type=int, help="ID of the webhook, from `dstrial webhook list`")
    key = actions.add_parser("key", help="print the key that signs webhooks")
    for action in (create, listing, delete, trial, key):
        add_state_dir_argument(action)
        action.add_argument(
            "--user",
            metavar="NAME",
            default="admin",
            help="name of the user to act as (default: %(default)s)",
        )


def main(args: argparse.Namespace) -> int:
    record = StateDirectory.choose(args.state_dir).require_running()
    if args.action == "key":
        key = Client(record.address, socket=record.socket).get("/owner/webhook-key")["key"]
        sys.stdout.write(f"{key}\n")
        return 0
    perform: Callable[[Client, argparse.Namespace], str] = {
        "create": _create,
        "list": _list,
        "delete": _delete,
        "test": _test,
    }[args.action]
    with _session(record, args.user) as client:
        sys.stdout.write(perform(client, args))
    return 0


@contextlib.contextmanager
def _session(record: MasterRecord, username: str) -> Iterator[Client]:
    from dstrial.master.login import new_token

    client = Client(record.address, new_token(record, username))
    try:
        yield client
    finally:
        with contextlib.suppress(MasterError):
            client.post("/api/v1/auth/logout")


def _create(client: Client, args: argparse.Namespace) -> str:
    states = args.state or ([] if args.log or args.alert else ["COMPLETED", "ERROR"])
    triggers: list[dict[str, Any]] = [
        {"triggerType": "TRIGGER_TYPE_EXPERIMENT_STATE_CHANGE", "condition": {"state": one.upper()}}
        for one in states
    ]
    triggers += [{"triggerType": "TRIGGER_TYPE_TASK_LOG", "condition": {"regex": one}} for one in args.log]
    if args.alert:
        triggers.append({"triggerType": "TRIGGER_TYPE_CUSTOM"})
    body = {
        "name": args.name,
        "url": args.url,
        "mode": "WEBHOOK_MODE_SPECIFIC" if args.specific or args.alert else "WEBHOOK_MODE_WORKSPACE",
        "webhookType": "WEBHOOK_TYPE_SLACK" if args.slack else "WEBHOOK_TYPE_DEFAULT",
        "workspaceId": None if args.workspace is None else _workspace_id(client, args.workspace),
        "triggers": triggers,
    }
    made = client.post("/api/v1/webhooks", body)["webhook"]
    return f"webhook {made['id']} is created; test it with `dstrial webhook test {made['id']}`\n"


def _workspace_id(client: Client, name: str) -> int:
    for one in client.get("/api/v1/workspaces", limit=-1)["workspaces"]:
        if one["name"].casefold() == name.casefold():
            return int(one["id"])
    raise RequestError(
        404,
        f"workspace {name!r} is not found; expected one of `{det_for(client.address)} workspace list`. Name another.",
    )


def _list(client: Client, args: argparse.Namespace) -> str:
    found = client.get("/api/v1/webhooks")["webhooks"]
    if args.as_json:
        return json.dumps(found, indent=2) + "\n"
    if not found:
        return "no webhooks; make one with `dstrial webhook create NAME URL`\n"
    names = {one["id"]: one["name"] for one in client.get("/api/v1/workspaces", limit=-1)["workspaces"]}
    return text_table(_HEADER, [_row(one, names) for one in found], right=_NUMBERS)


def _row(one: dict[str, Any], workspace_names: dict[int, str]) -> tuple[object, ...]:
    delivery = one["delivery"]
    where = (
        "all" if one["workspaceId"] is None else workspace_names.get(one["workspaceId"], one["workspaceId"])
    )
    last = delivery["lastTime"]
    return (
        one["id"],
        one["name"],
        ", ".join(_trigger_text(trigger) for trigger in one["triggers"]),
        f"{where}, if named" if one["mode"] == "WEBHOOK_MODE_SPECIFIC" else where,
        one["webhookType"].removeprefix("WEBHOOK_TYPE_").lower(),
        one["url"],
        delivery["delivered"],
        delivery["failed"],
        delivery["dropped"],
        delivery["waiting"],
        None if last is None else last[:19].replace("T", " "),
        delivery["lastResult"],
    )


def _trigger_text(trigger: dict[str, Any]) -> str:
    condition = trigger["condition"]
    if "regex" in condition:
        return f"log {condition['regex']!r}"
    return str(condition.get("state", "alerts"))


def _delete(client: Client, args: argparse.Namespace) -> str:
    client.send("DELETE", f"/api/v1/webhooks/{args.id}")
    return f"webhook {args.id} is deleted\n"


def _test(client: Client, args: argparse.Namespace) -> str:
    client.post(f"/api/v1/webhooks/{args.id}/test")
    return f"the receiver of webhook {args.id} has taken a test event\n"
