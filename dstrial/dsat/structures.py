"""Which structures a prediction considers, which of them need a dry run, and what follows for the others. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config import check_deepspeed
from dstrial.dsat.buckets import Buckets, with_buckets
from dstrial.dsat.knobs import KNOBS, ZERO, Knob, useful_values
from dstrial.dsat.space import Space, Structure
from dstrial.dsat.step_parts import Setup
from dstrial.engine.dryrun.values import DryRunResult, Line, MemoryForm, PhaseMemory

_KNOWN = frozenset(knob.path for knob in KNOBS)
_OFFLOADS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")
_OVERLAP = f"{ZERO}.overlap_comm"
_MOST_BASES = 96
_PARAMETERS_HELD = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters")
_DEFAULTS = {
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
}
_SMALL_PARAMETERS = 300
"""More parameters than this below a persistence threshold no usual model has of one size."""


class Structures:
    """The structures of a space, each looked at once.

    Args:
        space: what is searched.
        is_cpu: whether ranks train on a CPU, which has nowhere to offload to.
    """

    def __init__(self, space: Space, *, is_cpu: bool = False) -> None:
        self.space = space
        self._is_cpu = is_cpu
        self._effective: dict[Structure, dict[str, Any]] = {}
        self._own_effective = check_deepspeed(space.base, space.sizes, auto="warning").effective
        self._setups: dict[Structure, Setup] = {}
        self._keys: dict[tuple[Structure, bool], str] = {}
        self._bases: list[Structure] | None = None
        self._ran: dict[str, Structure] | None = None

    @property
    def own(self) -> Structure:
        """The user's own."""
        return Structure(self.space.own_stage, ())

    def bases(self) -> list[Structure]:
        """Return the legal structures that differ in what changes most: stage, offload, overlap, and ``--space``.

        The user's own is the first.
        """
        if self._bases is None:
            found, seen = [self.own], {self._identity(self.own)}
            for stage in self.space.stages:
                knobs = [
                    knob
                    for knob in self.space.knobs(stage)
                    if (knob.path in _OFFLOADS and self._may_offload(knob))
                    or knob.path == _OVERLAP
                    or knob.path not in _KNOWN
                ]
                for structure in self.space.structures(stage, knobs):
                    if self.space.illegal(self.space.candidate(structure, 0)) is not None:
                        continue
                    identity = self._identity(structure)
                    if identity not in seen and len(found) < _MOST_BASES:
                        seen.add(identity)
                        found.append(structure)
            self._bases = found
        return self._bases

    def neighbours(self, structure: Structure, num_params: float | None) -> list[Structure]:
        """Return the legal structures that differ from one in one knob, and are not the same to DeepSpeed.

        Args:
            structure: which.
            num_params: parameters of the model, above which sizes do not differ; None if unknown.
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
                if self.space.illegal(candidate) is not None:
                    continue
                identity = self._identity(changed)
                if identity not in seen:
                    seen.add(identity)
                    found.append(changed)
        return found

    def effective(self, structure: Structure) -> Mapping[str, Any]:
        """Return a structure's DeepSpeed config with all defaults in it."""
        if structure not in self._effective:
            candidate = self.space.candidate(structure, 0)
            config = self.space.base if structure == self.own else self.space.config(candidate)
            self._effective[structure] = check_deepspeed(config, self.space.sizes, auto="warning").effective
        return self._effective[structure]

    def setup(self, structure: Structure) -> Setup:
        """Return what of a structure decides where time goes."""
        if structure not in self._setups:
            self._setups[structure] = Setup.from_config(
                self.effective(structure),
                replicas=self.space.replicas,
                bytes_per_value=self.space.bytes_per_value,
            )
        return self._setups[structure]

    def changed(self, structure: Structure) -> tuple[tuple[str, Any], ...]:
        """Return the settings of a structure that differ from the user's own configuration."""
        return tuple(
            (path, value)
            for path, value in structure.settings
            if path not in _OFFLOADS and (path not in _KNOWN or _walk(self._own_effective, path) != value)
        )

    def run_key(self, structure: Structure, *, is_accumulating: bool) -> str:
        """Return the name of the dry run that a structure needs; others of the same name differ in buckets and the like."""
        known = self._keys.get((structure, is_accumulating))
        if known is None:
            setup = self.setup(structure)
            extras = [(path, value) for path, value in structure.settings if path not in _KNOWN]
            values = [setup.stage, setup.host_share, setup.has_host_params, extras, is_accumulating]
            known = self._keys[structure, is_accumulating] = json.dumps(values)
        return known

    def representatives(self) -> dict[str, tuple[Structure, bool]]:
        """Return run key -> the structure that is dry-run for it, and whether it accumulates."""
        splits = [self.space.ladder.split(position) for position in (0, self.space.ladder.last)]
        kinds = sorted({split.accumulation > 1 for split in splits}, reverse=True)
        found: dict[str, tuple[Structure, bool]] = {}
        for structure in self.bases():
            for is_accumulating in kinds:
                key = self.run_key(structure, is_accumulating=is_accumulating)
                found.setdefault(key, (structure, is_accumulating))
        return found

    def ran(self, structure: Structure, *, is_accumulating: bool) -> Structure:
        """Return the structure whose dry run speaks for another one; itself if there is none."""
        if self._ran is None:
            self._ran = {key: one for key, (one, _) in self.representatives().items()}
        return self._ran.get(self.run_key(structure, is_accumulating=is_accumulating), structure)

    def device_form(self, run: DryRunResult, structure: Structure, ran: Structure) -> MemoryForm:
        """Return bytes on the device of a structure, from the dry run of another one; never too little.

        Args:
            run: the dry run.
            structure: in question.
            ran: what was dry-run.
        """
        old, new = self.setup(ran), self.setup(structure)
        form = run.device
        if old.stage and new.stage == old.stage:
            width = self.space.bytes_per_value
            form = with_buckets(
                form,
                Buckets(old.stage, int(old.reduce_elements), width, old.is_overlapping),
                Buckets(new.stage, int(new.reduce_elements), width, new.is_overlapping),
            )
        more = self._held_bytes(structure, run) - self._held_bytes(ran, run)
        if more <= 0:
            return form
        phases = tuple(
            PhaseMemory(each.phase, tuple(Line(line.base + more, line.per_record) for line in each.lines))
            if each.phase != "init"
            else each
            for each in form.phases
        )
        return MemoryForm(phases, form.settled)

    def _held_bytes(self, structure: Structure, run: DryRunResult) -> float:
        """The most that stage 3's own knobs let it hold on to."""
        if structure.stage != 3:
            return 0.0
        zero = self.effective(structure).get(ZERO) or {}
        sizes = {name: float(zero.get(name) or default) for name, default in _DEFAULTS.items()}
        held = sum(min(sizes[name], run.parameters) for name in _PARAMETERS_HELD)
        held += min(sizes["stage3_param_persistence_threshold"] * _SMALL_PARAMETERS, run.parameters)
        updated = min(sizes["sub_group_size"], run.trainable_parameters / self.space.replicas)
        return held * self.space.bytes_per_value + 4.0 * updated

    def _may_offload(self, knob: Knob) -> bool:
        return not self._is_cpu or knob.path in self.space.extra

    def _identity(self, structure: Structure) -> str:
        return self.space.identity(self.space.candidate(structure, 0))


def positions(space: Space, largest: int | None = None) -> Sequence[int]:
    """Return the positions of the ladder that are considered.

    Args:
        space: what is searched.
        largest: micro batch size above which nothing is; None for the ladder's end.
    """
    ladder = space.ladder
    if not ladder.is_free:
        return range(ladder.last + 1)
    last = ladder.last if largest is None else ladder.position(largest)
    sizes = {1, last + 1}
    size = 2
    while size <= last + 1:
        sizes |= {size, size * 3 // 2, size * 5 // 4, size * 7 // 4}
        size *= 2
    return sorted(size - 1 for size in sizes if size <= last + 1)


def _walk(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
