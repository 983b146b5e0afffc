"""What keeps a checkpoint of one layout from being loaded in another; pure."""

from __future__ import annotations

import math

from dstrial.checkpoint.layout import Layout, ParameterPlace
from dstrial.resume.rules import KNOWN_WRAPPERS

# The same algorithm and state under several names; which one DeepSpeed takes depends on offload and device.
_SAME_OPTIMIZERS = (
    frozenset({"Adam", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"AdamW", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"FusedLion", "DeepSpeedCPULion"}),
)


def reshape_problems(saved: Layout, now: Layout) -> list[str]:
    """Say what keeps a checkpoint from being loaded in another layout; pure.

    Args:
        saved: the layout of the checkpoint.
        now: the layout of the engine that is to load it.

    Returns:
        One reason per entry, in words; empty if it can be loaded.
    """
    problems = []
    if saved.model_parallel_size != now.model_parallel_size:
        problems.append(
            f"model-parallel size was {saved.model_parallel_size}, is {now.model_parallel_size}: set it back"
        )
    elif saved.model_parallel_size > 1:
        problems.append(
            f"layers are cut over {saved.model_parallel_size} model-parallel ranks: go on with the layout that wrote them"
        )
    for wrapper in sorted({saved.wrapper, now.wrapper} - KNOWN_WRAPPERS):
        problems.append(f"{wrapper} cuts its state in a way of its own: go on with the layout that wrote it")
    for field, what in (("optimizer", "optimizer"), ("lr_scheduler", "learning-rate scheduler")):
        was, is_ = getattr(saved, field), getattr(now, field)
        if was != is_ and not any({was, is_} <= names for names in _SAME_OPTIMIZERS):
            problems.append(f"{what} was {was or 'none'}, is {is_ or 'none'}: set it back")
    if "nvme" in (
        saved.offload_optimizer,
        saved.offload_parameters,
        now.offload_optimizer,
        now.offload_parameters,
    ):
        problems.append("offload to NVMe: set the offload device to cpu or none on both sides")
    before, after = _by_name(saved), _by_name(now)
    for name in sorted(before.keys() | after.keys()):
        was_place, is_place = before.get(name), after.get(name)
        if was_place is None or is_place is None:
            problems.append(
                f"parameter {name} is {'new' if was_place is None else 'gone'}: use the same model"
            )
        elif was_place.shape != is_place.shape:
            problems.append(
                f"parameter {name} had shape {was_place.shape}, has {is_place.shape}: use the same model"
            )
        elif _is_trained(was_place) != _is_trained(is_place):
            state = "trained" if _is_trained(is_place) else "frozen"
            problems.append(f"parameter {name} is {state} now and was not: use the same model")
    return problems


def _is_trained(place: ParameterPlace) -> bool:
    """Say whether the optimizer changes a parameter."""
    # Without a wrapper it may own frozen parameters, which it leaves alone.
    return place.group_idx is not None and place.trainable and math.prod(place.shape) > 0


def _by_name(layout: Layout) -> dict[str, ParameterPlace]:
    places: dict[str, ParameterPlace] = {}
    for place in layout.parameters:
        places.setdefault(place.name, place)
    return places
