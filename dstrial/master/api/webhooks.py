"""Routes for webhooks (create, list, change, delete, test) and alerts of trials.

Source: Determined 0.38.1 ``master/internal/webhooks/api_webhook.go`` and ``authz_basic_impl.go``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from determined.common.api import bindings

from dstrial.config.secrets import MASK
from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import OWNER, TRIAL, USER, ApiRequest, reads, route, writes
from dstrial.master.store import experiments, trials, webhooks, workspaces
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports.logs import LEVELS, add_master_line
from dstrial.master.store.tokens import User
from dstrial.master.store.webhooks import Trigger, Webhook
from dstrial.master.webhooks import events
from dstrial.master.webhooks.delivery import send_event
from dstrial.master.webhooks.payloads import test_event

_TYPES = tuple(f"TRIGGER_TYPE_{name}" for name in ("EXPERIMENT_STATE_CHANGE", "TASK_LOG", "CUSTOM"))
_CONDITION_KEYS = {"EXPERIMENT_STATE_CHANGE": "state", "TASK_LOG": "regex"}


def webhook_json(webhook: Webhook, *, shows_url: bool) -> dict[str, Any]:
    """Return a webhook as ``v1Webhook``.

    The additional field "delivery" tells how the last events were delivered. The URL, which is often a secret, is masked
    unless ``shows_url``.
    """
    triggers = [
        message(
            bindings.v1Trigger,
            id=one.id,
            triggerType=f"TRIGGER_TYPE_{one.type}",
            condition={_CONDITION_KEYS[one.type]: one.condition} if one.type in _CONDITION_KEYS else {},
            webhookId=webhook.id,
        )
        for one in webhook.triggers
    ]
    last_us = webhook.delivery["lastTime"]
    return {
        **message(
            bindings.v1Webhook,
            id=webhook.id,
            name=webhook.name,
            url=webhook.url if shows_url else masked_url(webhook.url),
            webhookType=f"WEBHOOK_TYPE_{webhook.type}",
            mode=f"WEBHOOK_MODE_{webhook.mode}",
            workspaceId=webhook.workspace_id,
            triggers=triggers,
        ),
        "delivery": {**webhook.delivery, "lastTime": None if last_us is None else format_us(last_us)},
    }


def masked_url(url: str) -> str:
    """Return a URL without secrets, for example ``https://hooks.slack.com/********``."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{MASK}"


def visible_workspaces(connection: Connection, user: User) -> set[int] | None:
    """Return the ids of the workspaces whose webhooks a user may see; None means all."""
    if user.admin:
        return None
    return workspaces.owned_by(connection, user.id)


def _require_may_edit(connection: Connection, user: User, workspace_id: int | None) -> None:
    if user.admin:
        return
    if workspace_id is None or workspaces.require(connection, workspace_id).owner_id != user.id:
        # The status is not 403: Determined 0.38.1 returns a code that its client does not map to ForbiddenException.
        raise RequestError(
            400,
            f"user {user.username!r} is neither an administrator nor the owner of the webhook's workspace; expected one of "
            "them. Ask with `det -u admin`, or make it in a workspace of your own.",
        )


@reads
def list_webhooks(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    user = request.user
    found = webhooks.list_webhooks(connection, visible_workspaces(connection, user))
    return {
        "webhooks": [webhook_json(one, shows_url=user.admin or one.workspace_id is not None) for one in found]
    }


@writes
def create_webhook(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    webhook = _given_webhook(request.body())
    if webhook.workspace_id is not None:
        workspaces.require(tx.connection, webhook.workspace_id)
    _require_may_edit(tx.connection, request.user, webhook.workspace_id)
    created = webhooks.require(tx.connection, webhooks.create(tx, webhook))
    return message(bindings.v1PostWebhookResponse, webhook=webhook_json(created, shows_url=True))


def _given_webhook(body: Fields) -> Webhook:
    kind = (body.choice("webhookType", bindings.v1WebhookType) or "").removeprefix("WEBHOOK_TYPE_")
    mode = (body.choice("mode", bindings.v1WebhookMode) or "").removeprefix("WEBHOOK_MODE_")
    return Webhook(
        name=body.text("name") or "",
        url=body.required_text("url"),
        type="SLACK" if kind == "SLACK" else "DEFAULT",
        mode="SPECIFIC" if mode == "SPECIFIC" else "WORKSPACE",
        workspace_id=body.integer("workspaceId", 0, 2**31 - 1) or None,
        triggers=tuple(_given_trigger(one) for one in body.field_list("triggers") or []),
    )


def _given_trigger(fields: Fields) -> Trigger:
    kind = (fields.choice("triggerType", _TYPES) or "").removeprefix("TRIGGER_TYPE_")
    if not kind:
        raise fields.wrong("triggerType", "one of " + ", ".join(_TYPES))
    key = _CONDITION_KEYS.get(kind)
    condition = fields.mapping("condition") or {}
    if key is None:
        return Trigger(kind, "")
    value = condition.get(key)
    if set(condition) != {key} or not isinstance(value, str):
        raise fields.wrong("condition", f"an object with {key}, a string, and nothing else")
    return Trigger(kind, value)


def _editable_webhook(connection: Connection, request: ApiRequest) -> Webhook:
    """Return the webhook in the path; raise HTTP 400 if the user may not change it."""
    found = webhooks.require(connection, request.path_params["webhook_id"])
    _require_may_edit(connection, request.user, found.workspace_id)
    return found


@writes
def delete_webhook(tx: Transaction, request: ApiRequest) -> None:
    webhooks.delete(tx, _editable_webhook(tx.connection, request).id)


async def try_out(request: ApiRequest) -> dict[str, Any]:
    """Send a test event to a webhook's URL; raise HTTP 400 if the receiver rejects it."""
    services = request.services
    webhook = await services.read(_editable_webhook, request)
    event = test_event(str(uuid.uuid4()), int(time.time()))
    # Uses the default executor, not the database readers' pool: a hanging receiver must not block other requests.
    outcome = await asyncio.get_running_loop().run_in_executor(
        None, send_event, services, webhook.url, webhook.type, event
    )
    if outcome is None:
        raise RequestError(
            503, "the master is ending and sends nothing; try again after the next `dstrial up`"
        )
    if not outcome.is_delivered:
        raise RequestError(
            400,
            f"the receiver of webhook {webhook.id} answered: {outcome.result}; expected a status from 200 to 299. See what "
            "its address says, or change that.",
        )
    return message(bindings.v1TestWebhookResponse, completed=True)


@writes
def report_alert(tx: Transaction, request: ApiRequest) -> None:
    """Enqueue webhook events for an alert from ``core_context.alert`` of a trial."""
    body = request.body()
    experiment_id, trial_id = body.required_integer("experimentId", 1), body.integer("trialId") or None
    data = body.fields("data") or Fields({})
    if trial_id is not None:
        request.require_trial(trial_id)
    own = request.allocation
    if own is not None and own.experiment_id != experiment_id:
        raise RequestError(
            403,
            f"experiment {experiment_id} is not that of this token's allocation; expected its own. Use a user's token.",
        )
    title, description = data.text("title") or "", data.text("description") or ""
    level = (data.choice("level", bindings.v1LogLevel) or "").removeprefix("LOG_LEVEL_")
    experiments.require(tx.connection, experiment_id)
    trial = None if trial_id is None else trials.require(tx.connection, trial_id)
    if trial is not None and trial.experiment_id != experiment_id:
        raise RequestError(
            400,
            f"trial {trial_id} is one of experiment {trial.experiment_id}; expected one of {experiment_id}. Send both "
            "as they belong together.",
        )
    num_notified = events.notify_alert(
        tx,
        experiment_id,
        trial_id,
        title=title,
        description=description,
        level=level if level in LEVELS else "",
    )
    if num_notified == 0 and trial is not None:
        text = (
            f"the alert {title[:80]!r} reaches no webhook: integrations.webhooks of the config names none with a "
            "custom trigger in this workspace"
        )
        add_master_line(tx, trial.task_id, trial_id, text, level="WARNING")


async def show_key(request: ApiRequest) -> dict[str, Any]:
    return {"key": request.services.signing_key}


_ONE = "/webhooks/{webhook_id:int}"
routes = [
    route("GET", "/webhooks", list_webhooks, access=USER),
    route("POST", "/webhooks", create_webhook, access=USER),
    route("DELETE", _ONE, delete_webhook, access=USER),
    route("POST", f"{_ONE}/test", try_out, access=USER),
    route("POST", "/webhooks/custom", report_alert, access=TRIAL),
    route("GET", "//owner/webhook-key", show_key, access=OWNER),
]
