"""Leave frozen parameters out of checkpoints.

Instead, the checkpoint's layout has a checksum of each frozen parameter. At a resume, the trial's code must build the frozen
parameters with the same bits; otherwise loading raises an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, PipelineEngine

from dstrial.checkpoint.layout import Layout, own_shard
from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.engine.parameter_names import named_parameters
from dstrial.engine.state import loading_with
from dstrial.errors import CheckpointLayoutError, TrialContractError

SAVE_KEY = "save_frozen_parameters"
"""Key of ``data.dstrial``: whether checkpoints hold frozen parameters."""

_PIECE_NUMEL = 1 << 22  # elements converted to int64 at a time
_MIXER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd multiplier: each position gets a different weight


def leaves_out_frozen(exp_conf: Mapping[str, Any] | None) -> bool:
    return dstrial_section(exp_conf).get(SAVE_KEY) is False


def leave_out_frozen(engine: DeepSpeedEngine) -> None:
    """Make an engine's ``save_checkpoint`` leave out frozen parameters.

    Raises:
        TrialContractError: the engine is a pipeline.
    """
    if isinstance(engine, PipelineEngine):
        raise TrialContractError(
            f"data.dstrial.{SAVE_KEY} is false, and the engine is a pipeline, whose layers are read from their own files; "
            "expected a data-parallel engine. Set it to true."
        )
    engine.save_checkpoint = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)


@contextlib.contextmanager
def without_frozen(
    engine: DeepSpeedEngine, saved: Layout, now: Layout, allgather: Callable[[Any], list[Any]]
) -> Iterator[None]:
    """Make ``load_checkpoint`` accept missing frozen parameters inside the block.

    A no-op if the checkpoint holds frozen parameters. ``saved`` is the layout in the checkpoint, ``now`` that of the engine.
    The caller must have compared the names of trained parameters, because inside the block ``load_checkpoint`` checks no names.

    Raises:
        CheckpointLayoutError: the engine's frozen parameters differ from those at the time of saving.

    Ranks: all, collectively.
    """
    if not saved.frozen_checksums:
        yield
        return
    require_same_frozen(saved, frozen_checksums(engine, now, allgather))
    with loading_with(engine, functools.partial(engine.load_checkpoint, load_module_strict=False)):
        yield


def require_same_frozen(saved: Layout, built: Mapping[str, str]) -> None:
    """Raise ``CheckpointLayoutError`` if frozen parameters changed since the save.

    ``saved`` is the checkpoint's layout. ``built`` is the result of ``frozen_checksums`` for the present model.
    """
    wrong = [name for name, value in saved.frozen_checksums.items() if built.get(name) != value]
    if wrong:
        raise CheckpointLayoutError(
            f"the checkpoint holds no frozen parameters, and {len(wrong)} of {len(saved.frozen_checksums)} that the model now "
            f"has differ from those it was trained with ({', '.join(wrong[:3])}); expected the same bits. Build the model from "
            "the same base weights, or with the same seed, in the same precision."
        )


def frozen_checksums(
    engine: DeepSpeedEngine, layout: Layout, allgather: Callable[[Any], list[Any]]
) -> dict[str, str]:
    """Return name -> checksum of the bits, for each frozen parameter of the model.

    The checksums do not depend on how parameters are split over ranks. ``allgather(value)`` returns the values of all ranks.

    Ranks: all, collectively.
    """
    total: dict[str, int] = {}
    for of_rank in allgather(dict(_own_sums(engine, layout))):
        for name, value in of_rank.items():
            total[name] = total.get(name, 0) + value
    return {name: _as_text(total[name]) for name in sorted(total)}


def checksum(parameter: torch.Tensor) -> str:
    """Return a whole parameter's checksum, as ``frozen_checksums`` computes it."""
    return _as_text(_sum(parameter.detach().reshape(-1), 0))


def _own_sums(engine: DeepSpeedEngine, layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield (name, ``_sum`` of this rank's elements) for each frozen parameter."""
    # The sums of all ranks add up to the parameter's checksum.
    part, replica = engines.checkpoint_part(engine), engines.replica(engine)
    places = {place.name: place for place in layout.parameters if place.model_part == part}
    for name, parameter in named_parameters(engine.module):
        place = places[name]
        if place.trainable or place.tied_to is not None:
            continue
        if not place.is_cut:
            yield name, _sum(parameter.detach().reshape(-1), 0) if replica == 0 else 0
            continue
        piece, held = own_shard(place, replica), optimizers.held_part(parameter)
        if piece is not None and held is None:
            raise CheckpointLayoutError(
                f"the frozen parameter {name} is offloaded to NVMe, and the checkpoint would not hold it; expected it in memory. "
                f"Set data.dstrial.{SAVE_KEY} to true, or offload parameters to the cpu."
            )
        if piece is None or held is None:
            yield name, 0
        else:
            flat = held.detach().view(-1)[piece.begin : piece.begin + piece.numel]
            yield name, _sum(flat, piece.parameter_begin)


def _sum(flat: torch.Tensor, first: int) -> int:
    """Return the sum of a parameter's bits, weighted by position in the parameter."""
    # ``flat`` begins at element ``first``. The sums of ZeRO 3's slices add up to the whole parameter's sum.
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _PIECE_NUMEL):
        piece = flat[begin : begin + _PIECE_NUMEL].contiguous()
        bits = piece.view(kinds[piece.element_size()]).long() + 1
        positions = torch.arange(first + begin, first + begin + len(bits), device=flat.device)
        total += (bits * ((positions * _MIXER) | 1)).sum()
    return int(total)


def _as_text(total: int) -> str:
    return f"{total % (1 << 64):016x}"
