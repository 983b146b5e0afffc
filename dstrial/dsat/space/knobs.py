"""The table of DeepSpeed keys that ZeRO stages read, with the values to try.

``dstrial.config.deepspeed_rules.check`` decides which values may be combined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_rules.ignored import zero_keys_without_effect
from dstrial.config.parallel_dims import AUTOTP_KEY
from dstrial.dsat.core.candidate import Candidate

ZERO = "zero_optimization"
ALL_STAGES = (0, 1, 2, 3)

_BUCKETS = tuple(factor * 10**power for power in (6, 7, 8, 9) for factor in (1, 5))
_SWITCH = (True, False)


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """A DeepSpeed key or hyperparameter, with the values that a search tries."""

    path: str  # dotted key of DeepSpeed's JSON, or ``hyperparameters.<name>`` of the trial
    values: tuple[Any, ...]  # by ascending device memory, if the values differ in it
    stages: tuple[int, ...] = ALL_STAGES  # stages in which DeepSpeed reads the key
    in_pipeline: bool = True  # a pipeline engine reads the key
    grows_memory: bool = False  # a larger value needs more device memory
    counts_params: bool = False  # number of parameters; values above the model's only reserve more memory
    is_drawn: bool = True  # random methods draw it; other knobs save memory but cost much time


KNOBS: tuple[Knob, ...] = (
    Knob(f"{ZERO}.reduce_bucket_size", _BUCKETS, (1, 2, 3), grows_memory=True, counts_params=True),
    Knob(f"{ZERO}.allgather_bucket_size", _BUCKETS, (1, 2), grows_memory=True, counts_params=True),
    Knob(f"{ZERO}.overlap_comm", (False, True), (1, 2, 3), in_pipeline=False, grows_memory=True),
    Knob(f"{ZERO}.contiguous_gradients", _SWITCH, (1, 2, 3)),
    Knob(f"{ZERO}.reduce_scatter", _SWITCH, (2, 3)),
    Knob(f"{ZERO}.round_robin_gradients", (False, True), (1, 2), is_drawn=False),
    *(
        Knob(f"{ZERO}.{key}", values, (3,), grows_memory=True, counts_params=True)
        for key, values in {
            "stage3_prefetch_bucket_size": (5 * 10**6, 5 * 10**7, 5 * 10**8),
            "stage3_param_persistence_threshold": (10**4, 10**5, 10**6),
            "stage3_max_live_parameters": (10**8, 10**9),
            "stage3_max_reuse_distance": (10**8, 10**9),
            "sub_group_size": (10**8, 10**9),
        }.items()
    ),
    Knob(f"{ZERO}.offload_optimizer.device", ("none", "cpu"), (1, 2, 3), is_drawn=False),
    Knob(f"{ZERO}.offload_optimizer.ratio", (0.5, 1.0), (3,), is_drawn=False),
    Knob(f"{ZERO}.offload_param.device", ("none", "cpu"), (3,), is_drawn=False),
)
"""Source: DeepSpeed 0.19.8 runtime/engine.py, the constructor calls of its ZeRO optimizers; bucket sizes of dsat 0.37."""
KNOWN_PATHS = frozenset(knob.path for knob in KNOBS)


def useful_values(knob: Knob, num_params: float | None) -> tuple[Any, ...]:
    """Return the values of a knob that a search tries.

    Sizes above the model's ``num_params`` all have the same effect, so only the smallest of them is returned.
    """
    if not knob.counts_params or num_params is None:
        return knob.values
    below = tuple(value for value in knob.values if value <= num_params)
    return (*below, *sorted(value for value in knob.values if value > num_params)[:1])


def live_knobs(stage: int, *, is_pipeline: bool) -> tuple[Knob, ...]:
    return tuple(knob for knob in KNOBS if stage in knob.stages and (knob.in_pipeline or not is_pipeline))


def drop_dead_keys(merged: dict[str, Any], stage: int) -> None:
    """Remove disabled offloading, and keys that a ZeRO stage does not read, in place."""
    zero = merged.get(ZERO)
    if isinstance(zero, dict):
        for key in zero_keys_without_effect(stage):
            zero.pop(key, None)
        for section in ("offload_optimizer", "offload_param"):
            offload = zero.get(section)
            if isinstance(offload, Mapping) and offload.get("device", "none") in (None, "none"):
                del zero[section]


def with_neutral_values(
    settings: Sequence[tuple[str, Any]], stage: int, base: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return sorted settings, with offloading disabled if the ZeRO stage rejects it.

    ``base`` is the user's DeepSpeed config, which may enable offloading.
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
    """Return why a candidate is illegal; None if it is legal.

    A candidate is illegal if the check of its config (``found``) has an error, or if one of its settings has no effect.
    ``own_warnings`` are warnings about the user's own config, which are ignored.
    """
    if found.problems:
        return str(found.problems[0])
    # The only warning about AutoTP is that DeepSpeed counts records differently, which dsat does not.
    changed = {path for path, _ in candidate.settings} - {AUTOTP_KEY}
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
    """Return bytes per value: 2 for fp16 or bf16, else 4.

    ``effective`` is a DeepSpeed config with defaults filled in.
    """
    return 2 if effective["fp16"]["enabled"] or effective["bf16"]["enabled"] else 4
