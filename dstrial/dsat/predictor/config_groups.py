"""Group the configurations of a search space, and choose those to dry-run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.config.dotted_keys import value_at
from dstrial.dsat.core.candidate import BatchSplit, Candidate
from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.dsat.space import KNOBS, KNOWN_PATHS, ZERO, Space, Structure, useful_values, width_of

# Keys that enable offloading; keys whose value is a size -> their last part.
_OFFLOADS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")
_SIZES = {knob.path: knob.path.rpartition(".")[2] for knob in KNOBS if knob.counts_params}
_MAX_BASES = 96  # most groups that are searched
_BEYOND = 8  # largest micro batch to consider, relative to the largest that has run
# Micro batches that are considered if the batch is free: all up to 32, then 16 per doubling.
_ALL_UP_TO, _SHARES = 32, 16


class ConfigGroups:
    """Groups configurations by ZeRO stage, offloading and settings of unknown effect.

    A setting has a known effect if formulas predict the effect on time and memory (``KNOWN_PATHS``). Methods take a
    configuration without its batch sizes (``Structure``). On a CPU, offloading saves no memory, so it does not vary unless
    ``--space`` names it.
    """

    def __init__(self, space: Space, *, is_cpu: bool = False) -> None:
        self.space = space
        self.own = Structure(space.own_stage, ())
        self._is_cpu = is_cpu
        self._effective: dict[Structure, Mapping[str, Any]] = {}
        self._setups: dict[Structure, ZeroFeatures] = {}
        self._legal: dict[Structure, bool] = {}
        self._bases: list[Structure] = []

    def bases(self) -> list[Structure]:
        """Return one legal configuration of each group; the user's configuration is first.

        At most 96 groups are considered.
        """
        if self._bases:
            return self._bases
        found = {self.group(self.own): self.own}
        seen = {self.identity(self.space.candidate(self.own, 0))}
        for stage in self.space.stages:
            knobs = [knob for knob in self.space.knobs(stage) if self._makes_group(knob.path)]
            for structure in self.space.structures(stage, knobs):
                if len(found) < _MAX_BASES and self.is_legal(structure):
                    identity = self.identity(self.space.candidate(structure, 0))
                    if identity not in seen:
                        seen.add(identity)
                        found.setdefault(self.group(structure), structure)
        self._bases = list(found.values())
        return self._bases

    def moves(self, structure: Structure, num_params: float | None) -> list[Structure]:
        """Return the legal configurations that differ from this one in one setting.

        The setting is one of known effect, but not offloading. ``num_params`` is the model's number of parameters (None:
        unknown). Of sizes above this number, such as bucket sizes, only the smallest is tried.
        """
        found, settings = [], dict(structure.settings)
        effective = self._effective_of(_without(structure, _SIZES))
        for knob in self.space.knobs(structure.stage):
            if knob.path in _OFFLOADS or knob.path not in KNOWN_PATHS:
                continue
            now = settings.get(knob.path, value_at(effective, knob.path))
            for value in useful_values(knob, num_params):
                changed = Structure(structure.stage, tuple(sorted({**settings, knob.path: value}.items())))
                if value != now and self.is_legal(changed):
                    found.append(changed)
        return found

    def setup(self, structure: Structure) -> ZeroFeatures:
        """Return those ZeRO settings of a configuration on which predictions depend."""
        if structure not in self._setups:
            # Sizes change nothing else in a config, so the config is checked only once for all sizes.
            effective = dict(self._effective_of(_without(structure, _SIZES)))
            sizes = {_SIZES[path]: value for path, value in structure.settings if path in _SIZES}
            effective[ZERO] = {**(effective.get(ZERO) or {}), **sizes}
            dims = self.space.sizes_of(self.space.candidate(structure, 0))
            self._setups[structure] = ZeroFeatures.from_config(
                effective,
                replicas=dims.dp * dims.sp,
                bytes_per_value=width_of(effective),
                layer_ranks=dims.tp,
                sequence_ranks=dims.sp,
            )
        return self._setups[structure]

    def is_legal(self, structure: Structure) -> bool:
        """Return whether DeepSpeed accepts a configuration and uses all of its settings."""
        checked = _without(structure, _SIZES)
        if checked not in self._legal:
            self._legal[checked] = self.space.illegal_reason(self.space.candidate(checked, 0)) is None
        return self._legal[checked]

    def group(self, structure: Structure) -> tuple[Any, ...]:
        """Return a key that is equal for all configurations of the same group."""
        return (*self.setup(structure).group, self.unknown_settings(structure))

    def unknown_settings(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        """Return (path, value) of each setting whose effect no formula predicts."""
        return tuple((path, value) for path, value in structure.settings if path not in KNOWN_PATHS)

    def identity(self, candidate: Candidate, num_params: float | None = None) -> tuple[Any, ...]:
        """Return a key that is equal for configurations that DeepSpeed runs identically.

        Bucket and other sizes above ``num_params``, the model's number of parameters (None: unknown), count as equal.
        """
        setup = self.setup(structure_of(candidate))
        setup = setup if num_params is None else setup.clamped(num_params)
        added = [path for path in self.space.extra if path not in KNOWN_PATHS]
        return setup, repr([self.space.value(candidate, path) for path in added]), candidate.batch

    def run_key(self, structure: Structure, *, is_accumulating: bool) -> str:
        """Return the key of the dry run from which a configuration is predicted.

        Configurations that differ only in ZeRO's sizes and switches (such as buckets and overlap) share a dry run.
        ``is_accumulating``: a step has several micro batches.
        """
        setup = self.setup(structure)
        unknown = [list(pair) for pair in self.unknown_settings(structure) if pair[0] not in self.space.axes]
        on_host = float(setup.host_share > 0)
        return json.dumps([setup.stage, on_host, setup.has_host_params, unknown, is_accumulating])

    def representatives(self) -> dict[str, tuple[Structure, bool]]:
        """Return :meth:`run_key` -> (configuration to dry-run, whether it accumulates).

        A configuration accumulates if its step has several micro batches. Sizes of parallel dimensions from ``--space`` are
        removed, because their effect is computed without a dry run.
        """
        sizes = self.space.batch_size_grid
        kinds = sorted({sizes.split(position).accumulation > 1 for position in (0, sizes.last)}, reverse=True)
        return {
            self.run_key(structure, is_accumulating=is_accumulating): (
                _without(structure, self.space.axes),
                is_accumulating,
            )
            for structure in self.bases()
            for is_accumulating in kinds
        }

    def _effective_of(self, structure: Structure) -> Mapping[str, Any]:
        if structure not in self._effective:
            space = self.space
            candidate = space.own() if structure == self.own else space.candidate(structure, 0)
            self._effective[structure] = space.effective(candidate)
        return self._effective[structure]

    def _makes_group(self, path: str) -> bool:
        """Return whether different values at ``path`` make different groups."""
        if path in _OFFLOADS:
            return not self._is_cpu or path in self.space.extra
        return path not in KNOWN_PATHS


def _without(structure: Structure, paths: Collection[str]) -> Structure:
    kept = tuple((path, value) for path, value in structure.settings if path not in paths)
    return Structure(structure.stage, kept)


def structure_of(candidate: Candidate) -> Structure:
    """Return a configuration without its batch sizes."""
    return Structure(candidate.stage, candidate.settings)


def positions(space: Space, largest: int | None = None) -> Sequence[int]:
    """Return the micro batch sizes to try, as indices of ``space.batch_size_grid``.

    ``largest`` limits the sizes, in records, if the global batch size may change; None: no limit.
    """
    axis = space.batch_size_grid
    if not axis.is_free:
        return range(axis.last + 1)
    end = 1 + (axis.last if largest is None else axis.position(largest))
    # All small sizes, then 16 steps per doubling. Small steps matter if communication dominates.
    sizes = {end, *range(1, min(_ALL_UP_TO, end) + 1)}
    size = _ALL_UP_TO
    while size <= end:
        sizes |= {size * (_SHARES + number) // _SHARES for number in range(_SHARES)}
        size *= 2
    return sorted(size - 1 for size in sizes if size <= end)


def positions_near(space: Space, ran: Sequence[BatchSplit]) -> Sequence[int]:
    """Return the micro batch sizes up to 8 times the largest one that has run.

    They are returned as indices of ``space.batch_size_grid``. ``ran`` are the batch sizes that have run; if it is empty, the
    limit is 8 times the user's own micro batch.
    """
    axis = space.batch_size_grid
    largest = _BEYOND * max((one.micro_batch_size for one in ran), default=space.own().batch.micro_batch_size)
    return [at for at in positions(space, largest) if axis.split(at).micro_batch_size <= largest]
