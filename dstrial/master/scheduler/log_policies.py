"""``log_policies``: what a trial's output says about trying it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dstrial.config.experiment_config.sections import compile_pattern


@dataclasses.dataclass(frozen=True, slots=True)
class LogPolicy:
    """One compiled policy.

    Attributes:
        name: shown as ``logPolicyMatched``; None for none.
        text: the pattern, as the config has it.
        pattern: compiled; searched in every line.
        action: ``cancel_retries``, for a trial that is not tried again if it fails; ``exclude_node``, for one that is not
            started on this machine again; None for neither.
    """

    name: str | None
    text: str
    pattern: Any
    action: str | None


def compile_policies(config: Mapping[str, Any]) -> tuple[LogPolicy, ...]:
    """Compile the policies of a config with defaults, except those without a pattern.

    One that RE2 does not read is left out; an older version of dstrial may have accepted it.
    """
    found = []
    for policy in config.get("log_policies") or []:
        if not policy.get("pattern"):
            continue
        try:
            pattern = compile_pattern(str(policy["pattern"]))
        except ValueError:
            continue
        action = policy.get("action")
        kind = action.get("type") if isinstance(action, Mapping) else action
        found.append(
            LogPolicy(
                policy.get("name"), str(policy["pattern"]), pattern, None if kind is None else str(kind)
            )
        )
    return tuple(found)


def matches(policies: Sequence[LogPolicy], texts: Iterable[str]) -> list[tuple[LogPolicy, str]]:
    """Return the policies that match a text, each with its first matching line."""
    joined = "".join(texts)
    found = []
    for policy in policies:
        # Search the whole text first: most policies match nothing, and that costs less than a search of each line.
        if policy.pattern.search(joined):
            line = next((line for line in joined.splitlines() if policy.pattern.search(line)), None)
            if line is not None:
                found.append((policy, line))
    return found
