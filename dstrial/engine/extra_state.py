"""Carry the ranks' extra state of one layout over to another layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from dstrial.checkpoint.layout import Layout
from dstrial.engine.checkpoint_reader.equality import is_equal
from dstrial.engine.deepspeed_internals import engines
from dstrial.errors import CheckpointLayoutError


def extra_state_for(
    engine: DeepSpeedEngine, saved: Layout, now: Layout, extras: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return this rank's extra state from what the ranks of another layout saved.

    ``restore_engine_extra_state`` takes it. A replica takes over the buffers of the replica of its own number, or where there
    were fewer, of one of those that there were; a pipeline stage those of the layers that it has.

    Args:
        engine: the engine to be restored.
        saved: the layout that was saved.
        now: that of ``engine``.
        extras: what ``engine_extra_state`` returned, by rank of the saved layout.

    Raises:
        CheckpointLayoutError: no saved rank has a buffer that this one needs.

    Ranks: any; no communication.
    """
    replica = engines.replica(engine) % saved.data_parallel_size
    parts = [
        extras[part * saved.data_parallel_size + replica]
        for part in range(len(extras) // saved.data_parallel_size)
    ]
    buffers: dict[str, torch.Tensor] = {}
    tied: dict[str, Any] = {}
    for extra in parts:
        buffers.update(extra["buffers"])
        tied.update(extra.get("tied_modules", {}))
    wanted = [name for name, _ in engine.module.named_buffers()]
    missing = [name for name in wanted if name not in buffers]
    if missing:
        raise CheckpointLayoutError(
            f"the checkpoint has no buffers {', '.join(missing)}; expected those of the model. Use the same model."
        )
    first = parts[0]
    state = {
        **first,
        "micro_steps": engine.global_steps * now.micro_batches_per_batch,
        "buffers": {name: buffers[name] for name in wanted},
        "tied_modules": tied,
    }
    if "micro_offset" in first:
        forwards = int(first["micro_offset"])
        state["micro_offset"] = forwards // saved.micro_batches_per_batch * now.micro_batches_per_batch
    elif now.engine_kind == "pipeline":
        state["micro_offset"] = engine.global_steps * now.micro_batches_per_batch
    return state


def merged_tied_modules(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a pipeline's tied layers from every rank's extra state.

    Args:
        extras: what ``engine_extra_state`` returned, by rank.

    Raises:
        CheckpointLayoutError: the ranks hold different values of one layer.
    """
    tied: dict[str, Any] = {}
    unequal: set[str] = set()
    for extra in extras:
        for key, state in extra.get("tied_modules", {}).items():
            known = tied.setdefault(key, state)
            unequal |= {
                f"tied_modules.{key}.{name}" for name in state if not is_equal(known[name], state[name])
            }
    if unequal:
        raise CheckpointLayoutError(
            f"the checkpoint was written for another layout, and this one cannot take it: {describe_untied(sorted(unequal))}."
        )
    return tied


def describe_untied(names: Sequence[str]) -> str:
    """Say that tied parameters differ between stages, and what to do."""
    return (
        f"the tied parameters {', '.join(names)} differ between the pipeline's stages: keep the stages, or name them in "
        "tied_weight_attr of the TiedLayerSpec in a new run"
    )
