"""Which webhooks an event is told to; pure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookChoice:
    """What an experiment's config says of webhooks, ``integrations.webhooks``.

    Attributes:
        ids: numbers of webhooks of mode SPECIFIC that it is told to.
        names: the same by name.
        excludes: whether nothing of it is told to anybody.
    """

    ids: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    excludes: bool = False

    @classmethod
    def from_config(cls, config: str) -> WebhookChoice:
        """Read the JSON of a config; what is not as the schema has it counts as not said."""
        # Nearly every config says nothing of it, and some are large.
        if '"webhooks"' not in config:
            return cls()
        value: Any = json.loads(config)
        for key in ("integrations", "webhooks"):
            value = value.get(key)
            if not isinstance(value, dict):
                return cls()
        ids, names = value.get("webhook_id"), value.get("webhook_name")
        return cls(
            frozenset(one for one in ids if isinstance(one, int)) if isinstance(ids, list) else frozenset(),
            frozenset(one for one in names if isinstance(one, str))
            if isinstance(names, list)
            else frozenset(),
            value.get("exclude") is True,
        )


def is_told(
    *,
    webhook_id: int,
    name: str,
    mode: str,
    webhook_workspace_id: int | None,
    workspace_id: int,
    choice: WebhookChoice | None,
) -> bool:
    """Say whether a webhook hears of what happens in a workspace.

    Args:
        webhook_id: of the webhook.
        name: of the webhook.
        mode: WORKSPACE, or SPECIFIC for one that hears only of experiments whose config names it.
        webhook_workspace_id: the one it belongs to; None for all of them.
        workspace_id: where it happens.
        choice: of the experiment; None for a task that belongs to none.

    Source: Determined 0.38.1 ``master/internal/webhooks/postgres_webhook.go``, ``matchWebhook``.
    """
    if choice is not None and choice.excludes:
        return False
    if webhook_workspace_id is not None and webhook_workspace_id != workspace_id:
        return False
    if mode != "SPECIFIC":
        return True
    return choice is not None and (webhook_id in choice.ids or name in choice.names)
