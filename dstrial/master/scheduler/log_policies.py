"""Log policies: patterns that restrict a trial's restarts if its output has them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dstrial.config.schema import compile_pattern
from dstrial.master.store import nodes
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.webhooks import events


@dataclasses.dataclass(frozen=True, slots=True)
class LogPolicy:
    """A compiled entry of the config's ``log_policies``."""

    name: str | None  # the trial's ``logPolicyMatched`` after a match
    text: str  # the pattern, as written in the config
    pattern: Any  # compiled; searched in every line
    action: str | None  # ``cancel_retries``, ``exclude_node`` or None


def compile_policies(config: Mapping[str, Any]) -> tuple[LogPolicy, ...]:
    """Return the log policies of a validated config, except those without a pattern."""
    found = []
    for policy in config.get("log_policies") or []:
        text, action = policy.get("pattern"), policy.get("action")
        if text:
            kind = action.get("type") if isinstance(action, Mapping) else action
            found.append(LogPolicy(policy.get("name"), text, compile_pattern(text), kind))
    return tuple(found)


def matches(policies: Iterable[LogPolicy], texts: Iterable[str]) -> list[tuple[LogPolicy, str]]:
    """Return (policy, first matching line) of each log policy that matches a line."""
    patterns = [(policy, policy.pattern) for policy in policies]
    return events.first_matches(patterns, "".join(texts).splitlines()) if patterns else []


def note_matches(
    tx: Transaction, row: Allocation, matched: list[tuple[LogPolicy, str]], node_id: int, name: str
) -> None:
    """Store and apply the log policies that matched a node's output; log each once."""
    for policy, line in matched:
        if policy.name is not None:
            trial_rows.update(tx, row.trial_id, log_policy_matched=policy.name)
        column: Literal["retry_cancelled", "is_node_excluded"]
        if policy.action == "cancel_retries":
            column, then = "retry_cancelled", "the trial will not be started again if it fails"
        elif policy.action == "exclude_node":
            # Source: Determined 0.38.1, master/internal/logpattern, addRetryOnDifferentNode.
            nodes.exclude(tx, row.trial_id, node_id)
            column, then = "is_node_excluded", f"therefore will not schedule on {name} again if it fails"
        else:
            continue
        if trial_rows.set_flag(tx, row.trial_id, column):
            text = f'(log {json.dumps(line, ensure_ascii=False)} matched regex "{policy.text}") {then}'
            add_master_line(tx, row.task_id, row.trial_id, text, level="WARNING", allocation_id=row.id)
