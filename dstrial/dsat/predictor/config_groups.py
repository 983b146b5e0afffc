"""Which structures are considered, and which dry run speaks for each. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config import check_deepspeed
from dstrial.dsat.core.candidate import BatchSplit, value_at
from dstrial.dsat.predictor.zero_features import ZeroFeatures
from dstrial.dsat.space.knobs import KNOBS, KNOWN_PATHS, ZERO, Knob, useful_values, width_of
from dstrial.dsat.space.space import Space, Structure

_OFFLOADS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")
_OVERLAP = f"{ZERO}.overlap_comm"
_MOST_BASES = 96
_BEYOND = 8
_ALL_UP_TO, _SHARES = 32, 16
_SIZES = {knob.path: knob.path.rpartition(".")[2] for knob in KNOBS if knob.counts_params}
_NOT_IN_SETUP = frozenset({f"{ZERO}.round_robin_gradients"})
_RATIO = f"{ZERO}.offload_optimizer.ratio"


class ConfigGroups:
    """The structures of a space, each looked at once; a CPU has nowhere to offload to."""

    def __init__(self, space: Space, *, is_cpu: bool = False) -> None:
        self.space = space
        self._is_cpu = is_cpu
        self._effective: dict[Structure, dict[str, Any]] = {}
        self._own_effective = check_deepspeed(space.base, space.sizes, auto="warning").effective
        self._setups: dict[Structure, ZeroFeatures] = {}
        self._without_sizes: dict[Structure, Structure] = {}
        self._legal: dict[Structure, bool] = {}
        self._changed: dict[Structure, tuple[tuple[str, Any], ...]] = {}
        self._groups: dict[Structure, tuple[Any, ...]] = {}
        self._keys: dict[tuple[Structure, bool], str] = {}
        self._bases: list[Structure] | None = None
        self._ran: dict[str, Structure] | None = None

    @property
    def own(self) -> Structure:
        return Structure(self.space.own_stage, ())

    def bases(self) -> list[Structure]:
        """Return legal structures that differ in stage, offload, overlap, ``--space``."""
        if self._bases is None:
            found, seen = [self.own], {self._identity(self.own)}
            for stage in self.space.stages:
                knobs = [
                    knob
                    for knob in self.space.knobs(stage)
                    if (knob.path in _OFFLOADS and self._may_offload(knob))
                    or knob.path == _OVERLAP
                    or knob.path not in KNOWN_PATHS
                ]
                for structure in self.space.structures(stage, knobs):
                    if self.space.illegal_reason(self.space.candidate(structure, 0)) is not None:
                        continue
                    identity = self._identity(structure)
                    if identity not in seen and len(found) < _MOST_BASES:
                        seen.add(identity)
                        found.append(structure)
            self._bases = found
        return self._bases

    def neighbours(self, structure: Structure, num_params: float | None) -> list[Structure]:
        """Return the legal structures with one other knob that differ to DeepSpeed.

        Sizes above the model's ``num_params`` do not differ.
        """
        found, seen = [], {self._identity(structure)}
        for knob in self.space.knobs(structure.stage):
            if knob.path in _OFFLOADS and not self._may_offload(knob):
                continue
            for value in useful_values(knob, num_params):
                changed = Structure(
                    structure.stage, tuple(sorted({**dict(structure.settings), knob.path: value}.items()))
                )
                candidate = self.space.candidate(changed, 0)
                if self.space.illegal_reason(candidate) is not None:
                    continue
                identity = self._identity(changed)
                if identity not in seen:
                    seen.add(identity)
                    found.append(changed)
        return found

    def effective(self, structure: Structure) -> Mapping[str, Any]:
        """Return a structure's DeepSpeed config with all defaults in it."""
        if structure not in self._effective:
            self._effective[structure] = self._new_effective(structure)
        return self._effective[structure]

    def _new_effective(self, structure: Structure) -> dict[str, Any]:
        if structure == self.own:
            return self._own_effective
        candidate = self.space.candidate(structure, 0)
        if self.space.sizes_of(candidate) == self.space.sizes:
            return self.space.checked(candidate).effective
        return check_deepspeed(self.space.config(candidate), self.space.sizes, auto="warning").effective

    def setup(self, structure: Structure) -> ZeroFeatures:
        """Return the features of a structure that decide where time and memory go."""
        if structure not in self._setups:
            # Sizes change nothing else in a config, so it is not checked again for each of them.
            frame = self.without_sizes(structure)
            effective = dict(self.effective(frame))
            sizes = {_SIZES[path]: value for path, value in structure.settings if path in _SIZES}
            effective[ZERO] = {**(effective.get(ZERO) or {}), **sizes}
            self._setups[structure] = ZeroFeatures.from_config(
                effective, replicas=self.space.replicas, bytes_per_value=width_of(effective)
            )
        return self._setups[structure]

    def without_sizes(self, structure: Structure) -> Structure:
        """Return a structure without its sizes; it is legal if the structure is."""
        if structure not in self._without_sizes:
            kept = tuple((path, value) for path, value in structure.settings if path not in _SIZES)
            self._without_sizes[structure] = Structure(structure.stage, kept)
        return self._without_sizes[structure]

    def is_legal(self, structure: Structure) -> bool:
        """Say whether DeepSpeed takes a structure and all of its settings have effect."""
        frame = self.without_sizes(structure)
        if frame not in self._legal:
            self._legal[frame] = self.space.illegal_reason(self.space.candidate(frame, 0)) is None
        return self._legal[frame]

    def group(self, structure: Structure) -> tuple[Any, ...]:
        """Return what changes most: stage, what is on the host, keys of ``--space``."""
        if structure not in self._groups:
            self._groups[structure] = (*self.setup(structure).group, self.unknown_settings(structure))
        return self._groups[structure]

    def unknown_settings(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        """Return the settings of a structure about which no rule is known."""
        return tuple((path, value) for path, value in structure.settings if path not in KNOWN_PATHS)

    def settings_beside_setup(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        """Return the settings of a structure that are no part of its ``setup``."""
        return tuple((path, value) for path, value in self.changed(structure) if path in _NOT_IN_SETUP) + (
            self.unknown_settings(structure)
        )

    def moves(self, structure: Structure, num_params: float | None) -> list[Structure]:
        """Return the structures of the group that differ in one knob, legal or not."""
        found, own = [], dict(structure.settings)
        zero = self.effective(self.without_sizes(structure))
        for knob in self.space.knobs(structure.stage):
            if knob.path in _OFFLOADS or knob.path == _RATIO or knob.path not in KNOWN_PATHS:
                continue
            now = own.get(knob.path, value_at(zero, knob.path))
            for value in useful_values(knob, num_params):
                if value != now:
                    changed = tuple(sorted({**own, knob.path: value}.items()))
                    found.append(Structure(structure.stage, changed))
        return found

    def changed(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        """Return the known settings that differ from the user's own configuration."""
        if structure not in self._changed:
            self._changed[structure] = self._new_changed(structure)
        return self._changed[structure]

    def _new_changed(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        return tuple(
            (path, value)
            for path, value in structure.settings
            if path in KNOWN_PATHS and path not in _OFFLOADS and value_at(self._own_effective, path) != value
        )

    def run_key(self, structure: Structure, *, is_accumulating: bool) -> str:
        """Return the name of a structure's dry run, equal whatever buckets and the like."""
        known = self._keys.get((structure, is_accumulating))
        if known is None:
            setup = self.setup(structure)
            extras = [(path, value) for path, value in structure.settings if path not in KNOWN_PATHS]
            values = [setup.stage, setup.host_share, setup.has_host_params, extras, is_accumulating]
            known = self._keys[structure, is_accumulating] = json.dumps(values)
        return known

    def representatives(self) -> dict[str, tuple[Structure, bool]]:
        """Return run key -> the structure to dry-run for it, and whether it accumulates."""
        splits = [
            self.space.batch_size_grid.split(position) for position in (0, self.space.batch_size_grid.last)
        ]
        kinds = sorted({split.accumulation > 1 for split in splits}, reverse=True)
        found: dict[str, tuple[Structure, bool]] = {}
        for structure in self.bases():
            for is_accumulating in kinds:
                key = self.run_key(structure, is_accumulating=is_accumulating)
                found.setdefault(key, (structure, is_accumulating))
        return found

    def dry_run_representative(self, structure: Structure, *, is_accumulating: bool) -> Structure:
        """Return the structure whose dry run speaks for another, or itself without one."""
        if self._ran is None:
            self._ran = {key: one for key, (one, _) in self.representatives().items()}
        return self._ran.get(self.run_key(structure, is_accumulating=is_accumulating), structure)

    def _may_offload(self, knob: Knob) -> bool:
        return not self._is_cpu or knob.path in self.space.extra

    def _identity(self, structure: Structure) -> str:
        return self.space.identity(self.space.candidate(structure, 0))


def positions(space: Space, largest: int | None = None) -> Sequence[int]:
    """Return the grid's positions up to a micro batch of ``largest``, or to its end."""
    ladder = space.batch_size_grid
    if not ladder.is_free:
        return range(ladder.last + 1)
    last = ladder.last if largest is None else ladder.position(largest)
    # All small sizes, then steps of a sixteenth to an eighth, which matter where communication dominates.
    sizes = {last + 1, *range(1, min(_ALL_UP_TO, last + 1) + 1)}
    size = _ALL_UP_TO
    while size <= last + 1:
        sizes |= {size * (_SHARES + number) // _SHARES for number in range(_SHARES)}
        size *= 2
    return sorted(size - 1 for size in sizes if size <= last + 1)


def positions_near(space: Space, ran: Sequence[BatchSplit]) -> Sequence[int]:
    """Return ladder positions up to 8 times the largest micro batch run, or the own."""
    largest = _BEYOND * max((one.micro_batch_size for one in ran), default=space.own().batch.micro_batch_size)
    return [
        position
        for position in positions(space, largest)
        if space.batch_size_grid.split(position).micro_batch_size <= largest
    ]
