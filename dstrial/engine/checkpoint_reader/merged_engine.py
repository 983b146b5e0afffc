"""Read an AutoTP checkpoint as if it was written with another ``autotp_size``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from dstrial.checkpoint.layout import Layout
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine


class MergedEngine(SavedEngine):
    """Saved state of one engine, sliced for a rank of another ``autotp_size``.

    Parameters have the shape of this rank's slices. Memory holds one whole parameter at a time.

    Args:
        parts: saved state of each tensor-parallel rank, in order of ranks.
        layout: the saved engine's layout.
        now: the layout of this run's engine.
        part: this rank's tensor-parallel rank.
    """

    def __init__(self, parts: Sequence[SavedEngine], layout: Layout, now: Layout, part: int) -> None:
        vars(self).update(vars(parts[0]))  # counters, settings and scalars are equal on all parts
        self.layout = layout
        self._parts = parts
        self._slices = now.slices()
        self._part = part
        self._last = functools.lru_cache(maxsize=1)(self._merge)

    def copy(self, name: str, key: str, begin: int, out: torch.Tensor) -> None:
        out.copy_(self._last(name, key, False)[begin : begin + out.numel()])

    def recorded(self, name: str, key: str, begin: int, numel: int) -> Iterator[torch.Tensor]:
        yield self._last(name, key, True)[begin : begin + numel]

    def unequal_copies(self) -> list[str]:
        """Return names of unsliced parameters whose copies on AutoTP's ranks differ."""
        return [
            name
            for name, place in self.places.items()
            if place.tensor_dim is None
            and self.holds(name)
            and any(
                not torch.equal(self._parts[0].full(name, key), other.full(name, key))
                for key in (MASTER, *self.state_keys(name))
                for other in self._parts[1:]
            )
        ]

    def _merge(self, name: str, key: str, is_recorded: bool) -> torch.Tensor:
        """Return this rank's slice of a parameter's weights or optimizer state, flattened.

        ``key`` is ``MASTER`` for the weights, or the name of an optimizer state such as ``exp_avg``. ``is_recorded``: whether to
        read with ``SavedEngine.recorded`` instead of ``copy``.
        """
        owner = self.place(name).name
        # AutoTP may slice a parameter for one ``autotp_size`` and leave it whole for another.
        before, after = self.place(owner).tensor_dim, self._slices[owner][0].tensor_dim
        parts = self._parts[:1] if before is None else self._parts
        slices = [self._read(part, owner, key, is_recorded) for part in parts]
        whole = slices[0] if before is None else torch.cat(slices, before)
        if after is None:
            return whole.reshape(-1)
        sizes = [place.shape[after] for place in self._slices[owner]]
        return whole.narrow(after, sum(sizes[: self._part]), sizes[self._part]).reshape(-1)

    @staticmethod
    def _read(part: SavedEngine, name: str, key: str, is_recorded: bool) -> torch.Tensor:
        if not is_recorded:
            return part.full(name, key)
        shape = part.place(name).shape
        pieces = list(part.recorded(name, key, 0, math.prod(shape)))
        return torch.cat(pieces).reshape(shape) if pieces else torch.empty(shape)


def read_for_rank(
    read: Callable[[Layout], SavedEngine], saved: Layout, now: Layout, part: int
) -> SavedEngine:
    """Return an engine's saved state, with parameters sliced for one rank of this run.

    Args:
        read: function that opens the engine's saved state; the argument is the layout of the part to open.
        saved: the layout in the checkpoint.
        now: the layout of this run's engine.
        part: this rank's model-parallel rank.
    """
    if saved.model_parallel_size != now.model_parallel_size:
        parts = [read(saved.of_part(one)) for one in range(saved.model_parallel_size)]
        return MergedEngine(parts, saved, now, part)
    return read(saved if saved.model_parallel_size == 1 else saved.of_part(part))
