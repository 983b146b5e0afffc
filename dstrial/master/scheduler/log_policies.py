"""What a trial's output says about whether to try it again: ``log_policies`` of the experiment config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dstrial.config.log_patterns import compile_pattern


@dataclasses.dataclass(frozen=True, slots=True)
class LogPolicy:
    """One compiled policy.

    Attributes:
        name: shown as ``logPolicyMatched``; None for none.
        text: the pattern, as the config has it.
        pattern: compiled; searched in every line.
        cancels_retries: whether a trial that fails after a match is not tried again. On one machine this is also what
            excluding the node comes to.
    """

    name: str | None
    text: str
    pattern: Any
    cancels_retries: bool


def compile_policies(config: Mapping[str, Any]) -> tuple[LogPolicy, ...]:
    """Compile the policies of a config with defaults; one without a pattern is switched off.

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
                policy.get("name"),
                str(policy["pattern"]),
                pattern,
                kind in ("cancel_retries", "exclude_node"),
            )
        )
    return tuple(found)


def matches(policies: Sequence[LogPolicy], texts: Iterable[str]) -> list[LogPolicy]:
    """Return the policies whose pattern is in one of the texts."""
    joined = "".join(texts)
    return [
        policy
        for policy in policies
        if policy.pattern.search(joined) and any(policy.pattern.search(line) for line in joined.splitlines())
    ]
