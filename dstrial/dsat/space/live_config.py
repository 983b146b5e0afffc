"""What a ZeRO stage reads of a DeepSpeed config, and what is neutral. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.config import CheckResult, zero_keys_without_effect
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.space.knobs import ZERO


def drop_dead_keys(merged: dict[str, Any], stage: int) -> None:
    """Remove keys that a stage does not read, and offloading that is switched off."""
    zero = merged.get(ZERO)
    if isinstance(zero, dict):
        for key in zero_keys_without_effect(stage):
            zero.pop(key, None)
        for section in ("offload_optimizer", "offload_param"):
            offload = zero.get(section)
            if isinstance(offload, Mapping) and offload.get("device", "none") in (None, "none"):
                del zero[section]


def live_zero(effective: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the ZeRO section that a stage reads.

    Args:
        effective: the config with all defaults in it.
        stage: ZeRO stage.
    """
    zero = dict(effective[ZERO])
    for key in zero_keys_without_effect(stage):
        zero.pop(key, None)
    for section in ("offload_optimizer", "offload_param"):
        offload = zero.get(section)
        if isinstance(offload, Mapping) and offload.get("device") in (None, "none"):
            zero.pop(section)
    return zero


def with_neutral_values(
    settings: Sequence[tuple[str, Any]], stage: int, base: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return sorted settings, neutral where a stage refuses the user's own value.

    Args:
        settings: (dotted path, value) pairs.
        stage: ZeRO stage.
        base: the user's own config.
    """
    values = dict(settings)
    zero = base.get(ZERO)
    given = zero if isinstance(zero, Mapping) else {}
    for section, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        if given.get(section) and stage not in stages:
            values.setdefault(f"{ZERO}.{section}.device", "none")
    optimizer = given.get("offload_optimizer")
    if isinstance(optimizer, Mapping) and optimizer.get("ratio", 1) != 1 and stage != 3:
        values.setdefault(f"{ZERO}.offload_optimizer.ratio", 1.0)
    if values.get(f"{ZERO}.offload_optimizer.device", "cpu") == "none":
        values.pop(f"{ZERO}.offload_optimizer.ratio", None)
    return tuple(sorted(values.items()))


def refusal(found: CheckResult, candidate: Candidate, own_warnings: Collection[str]) -> str | None:
    """Say why a candidate is refused or which setting has no effect; None if legal.

    Args:
        found: the check of the candidate's config.
        candidate: what it is made of.
        own_warnings: of the user's own config.
    """
    if found.problems:
        return str(found.problems[0])
    changed = {path for path, _ in candidate.settings}
    dead = [
        warning
        for warning in found.warnings
        if warning not in own_warnings and any(f"{path} " in warning for path in changed)
    ]
    dead += [
        f"{ZERO}.{key} has no effect in stage {candidate.stage}"
        for key in zero_keys_without_effect(candidate.stage)
        if f"{ZERO}.{key}" in changed
    ]
    return dead[0] if dead else None


def width_of(effective: Mapping[str, Any]) -> int:
    """Return 2 for a config with half precision (fp16 or bf16), else 4.

    Args:
        effective: the config with all defaults in it.
    """
    return 2 if effective["fp16"]["enabled"] or effective["bf16"]["enabled"] else 4
