"""The search space: structures (ZeRO stage and settings) and micro batches.

``dstrial.config.deepspeed_rules.check`` alone decides whether a configuration is legal and whether a key has any effect.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult, check_deepspeed
from dstrial.config.merge import merge_deepspeed
from dstrial.config.parallel_dims import AUTOTP_KEY, ParallelDims
from dstrial.dsat.core.candidate import (
    HYPERPARAMETERS,
    BatchSizeGrid,
    BatchSplit,
    Candidate,
    changes_in_words,
    value_at,
)
from dstrial.dsat.space.knobs import (
    ALL_STAGES,
    KNOWN_PATHS,
    ZERO,
    Knob,
    drop_dead_keys,
    live_knobs,
    refusal,
    useful_values,
    width_of,
    with_neutral_values,
)
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.search.sampling import SearchRandom

_MAX_CHECKED = 1024  # cached checks; callers ask about the same candidate several times in a row
_STAGE_NAMES = ("pipeline_stages", "num_stages", "pipe_parallel_size")
"""Hyperparameters that may set a trial's number of stages, if they equal ``data.dstrial.pipeline_stages``."""
_LAYER_NAMES = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")
"""Hyperparameters that may set the number of layers, which pipeline stages divide."""

_AXES = {AUTOTP_KEY: "tp", "sequence_parallel_size": "sp"}
"""Path of ``--space`` that sets a parallel dimension -> field of ``ParallelDims``."""
_PER_STAGE = 8  # micro batches per stage that fill a pipeline
_BUSY = 8 / 9  # share of busy stages that 8 P micro batches of P stages exceed: 8 P / (9 P - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A configuration without its batch sizes: a ZeRO stage and settings."""

    stage: int
    settings: tuple[tuple[str, Any], ...]  # (dotted path, value), sorted


class Space:
    """The configurations that may be measured for one experiment.

    ``base`` is the user's merged DeepSpeed config. ``stages`` are ZeRO stages. ``free_batch`` lets the global batch follow the
    micro batch. ``extra`` is ``--space`` as path -> values, which replace a setting's values or add a setting.
    ``hyperparameters`` are those of the experiment.

    Raises:
        ConfigError: the batch sizes of the config contradict each other, or do not divide by the replicas.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        sizes: ParallelDims,
        *,
        stages: Sequence[int] = (1, 2, 3),
        train_batch_size: int | None = None,
        free_batch: bool = False,
        extra: Mapping[str, Sequence[Any]] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._hyperparameters = copy.deepcopy(dict(hyperparameters or {}))
        self.base = {key: value for key, value in copy.deepcopy(dict(base)).items() if key != "autotuning"}
        if train_batch_size is not None:
            self.base["train_batch_size"] = train_batch_size
            self.base.pop("gradient_accumulation_steps", None)
        self.sizes = sizes
        self.extra = {path: tuple(values) for path, values in (extra or {}).items()}
        checked = check_deepspeed(self.base, sizes, auto="warning")
        checked.raise_if_any()
        assert checked.batch is not None
        self._effective = checked.effective
        self._own_warnings = frozenset(checked.warnings)
        self._stage: int = checked.effective[ZERO]["stage"] or 0
        batch = checked.batch
        self._own_batch = BatchSplit(
            batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps, batch.train_batch_size
        )
        self.batch_size_grid = BatchSizeGrid(
            None if free_batch else batch.train_batch_size,
            batch.data_parallel_size,
            max(batch.gradient_accumulation_steps, enough_accumulation(sizes.pp)),
        )
        self.stages_path = _stages_path(tuple(self.extra), self._hyperparameters, sizes)
        axes = _AXES if self.stages_path is None else {**_AXES, self.stages_path: "pp"}
        self.axes = {path: field for path, field in axes.items() if path in self.extra}
        if AUTOTP_KEY in self.axes and sizes.tp > 1:
            raise ConfigError(
                [
                    ConfigProblem(
                        AUTOTP_KEY,
                        f"{sizes.tp} in your own config",
                        "1, where --space tries other sizes",
                        "Set it to 1: with another size DeepSpeed counts records more than once.",
                    )
                ]
            )
        self.replicas = batch.data_parallel_size
        legal = (0, 1) if sizes.has_pipeline_engine else ALL_STAGES
        self.stages = tuple(stage for stage in sorted(set(stages)) if stage in legal) or (self._stage,)
        self._reasons: dict[str, str | None] = {}
        self._refusals: dict[tuple[int, str, str], str | None] = {}
        self._checked: dict[str, CheckResult] = {}

    @property
    def own_stage(self) -> int:
        return self._stage

    @property
    def bytes_per_value(self) -> int:
        """Bytes of a parameter or gradient: 2 in half precision (fp16 or bf16), else 4."""
        return width_of(self._effective)

    def own(self) -> Candidate:
        return Candidate(self._stage, (), self._own_batch, is_own=True)

    def smallest(self) -> Candidate:
        """Return the user's own configuration with the smallest micro batch."""
        return Candidate(self._stage, (), self.batch_size_grid.split(0))

    def knobs(self, stage: int) -> tuple[Knob, ...]:
        """Return the settings that vary in a ZeRO stage, each with its legal values.

        These are the settings that dsat varies by default, and those of ``--space``.
        """
        result = [
            dataclasses.replace(knob, values=self.extra[knob.path], is_drawn=True)
            if knob.path in self.extra
            else knob
            for knob in live_knobs(stage, is_pipeline=self.sizes.has_pipeline_engine)
        ]
        for path, values in self.extra.items():
            if path not in KNOWN_PATHS:
                legal = tuple(value for value in values if self._refusal(stage, path, value) is None)
                result += [Knob(path, legal)] if legal else []
        return tuple(sorted(result, key=lambda knob: knob.path))

    def value(self, candidate: Candidate, path: str) -> Any:
        """Return a candidate's effective value of a key or hyperparameter; None if unset."""
        if path.startswith(HYPERPARAMETERS):
            own = value_at(self._hyperparameters, path.removeprefix(HYPERPARAMETERS))
            return dict(candidate.settings).get(path, own)
        return value_at(self.effective(candidate), path)

    def rejection_reason(self, path: str, value: Any) -> str | None:
        """Return why no ZeRO stage accepts a value of ``--space``; None if a stage does."""
        reasons = [self._refusal(stage, path, value) for stage in self.stages]
        return None if None in reasons else reasons[-1]

    def _refusal(self, stage: int, path: str, value: Any) -> str | None:
        """Return why a stage rejects a value, alone or beside another setting; else None."""
        if path.startswith(HYPERPARAMETERS):
            return None
        key = (stage, path, repr(value))
        if key not in self._refusals:
            device = f"{path.rpartition('.')[0]}.device"  # offloading's other keys need a device
            beside = [(device, "cpu")] if device in KNOWN_PATHS - {path} else []
            beside += [
                (other, one) for other, values in self.extra.items() if other != path for one in values
            ]
            structures = [
                self._structure(stage, [*others, (path, value)])
                for others in ([], *([one] for one in beside))
            ]
            reasons = [self.illegal_reason(self.candidate(structure, 0)) for structure in structures]
            self._refusals[key] = None if None in reasons else reasons[0]
        return self._refusals[key]

    def draw(self, random: SearchRandom, stage: int, num_params: float | None = None) -> Structure:
        """Draw a ZeRO stage's settings at random.

        Bucket and other sizes above ``num_params``, the number of parameters, count as one value.
        """
        settings = []
        for knob in self.knobs(stage):
            if knob.is_drawn:
                values = useful_values(knob, num_params)
                settings.append((knob.path, values[random.integer_below(len(values))]))
        return self._structure(stage, settings)

    def describe(self, candidate: Candidate) -> str:
        """Return a line with stage, batch, and changes to the user's own configuration."""
        batch = candidate.batch
        words = [f"stage {candidate.stage}, micro batch {batch.micro_batch_size} x {batch.accumulation}"]
        num_stages = self.sizes_of(candidate).pp
        if num_stages > 1:
            words.append(
                f"{num_stages} pipeline stages ({1 - efficiency(batch.accumulation, num_stages):.0%} idle)"
            )
        words += changes_in_words(candidate, self._effective, self._hyperparameters)
        return ", ".join(words)

    def structures(self, stage: int, knobs: Sequence[Knob]) -> Iterator[Structure]:
        """Yield a configuration for every combination of the knobs' values, legal or not."""
        for values in itertools.product(*(knob.values for knob in knobs)):
            yield self._structure(stage, list(zip((knob.path for knob in knobs), values, strict=True)))

    def first_position(self, last: int) -> int:
        """Return the grid index of the micro batch to try first, at most ``last``.

        For a pipeline this is the largest micro batch that leaves enough micro batches per step to keep the stages busy;
        otherwise it is ``last``.
        """
        num_stages, batches = self.sizes.pp, self.batch_size_grid
        if num_stages == 1 or batches.is_free:
            return last
        positions = range(last + 1)
        full = [at for at in positions if efficiency(batches.split(at).accumulation, num_stages) > _BUSY]
        return full[-1] if full else 0

    def candidate(self, structure: Structure, position: int) -> Candidate:
        """Add the micro batch size at index ``position`` of the grid to a structure."""
        batch = self.batch_size_grid.split(position)
        if self.axes and not self.sizes_problem(structure.settings):
            sizes = self._sizes(structure.settings)
            if sizes.dp != self.sizes.dp:
                # Other sizes mean another number of replicas, which divide the same batch.
                batch = _redivide_batch(batch, sizes, is_free=self.batch_size_grid.is_free)
        return Candidate(structure.stage, structure.settings, batch)

    def sizes_of(self, candidate: Candidate) -> ParallelDims:
        """Return a candidate's parallel dimensions.

        If they cannot divide the ranks or layers, the dimensions of the user's own configuration are returned.
        """
        if not self.axes or self.sizes_problem(candidate.settings) is not None:
            return self.sizes
        return self._sizes(candidate.settings)

    def sizes_problem(self, settings: Sequence[tuple[str, Any]]) -> str | None:
        """Return why ``settings`` cannot divide ranks or layers; None if they can."""
        try:
            num_stages = self._sizes(settings).pp
        except ValueError as error:
            return str(error)
        is_own = num_stages == self.sizes.pp
        return None if is_own else _layers_problem(num_stages, self._hyperparameters)

    def _sizes(self, settings: Sequence[tuple[str, Any]]) -> ParallelDims:
        """Return parallel dimensions with ``settings`` applied; ValueError if impossible."""
        changed = {self.axes[path]: value for path, value in settings if path in self.axes}
        for value in changed.values():
            if type(value) is not int:
                raise ValueError(f"a parallel dimension is {value!r}; expected a whole number. Correct it.")
        return dataclasses.replace(self.sizes, is_pipeline=self.sizes.has_pipeline_engine, **changed)

    def config(self, candidate: Candidate) -> dict[str, Any]:
        """Return a candidate's DeepSpeed config, without keys that its stage ignores."""
        merged = merge_deepspeed(self.base, candidate.overwrite())
        drop_dead_keys(merged, candidate.stage)
        return merged

    def checked(self, candidate: Candidate) -> CheckResult:
        """Return the cached check of a candidate's DeepSpeed config."""
        # The key is a text: values of --space may be lists, and 1 and True are equal, but not the same to DeepSpeed.
        key = json.dumps(candidate.to_json(), sort_keys=True)
        if key not in self._checked:
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            # User keys that are dead in another stage are harmless, so ``config`` removes them before the check.
            merged = self.config(candidate)
            self._checked[key] = check_deepspeed(merged, self.sizes_of(candidate), auto="warning")
        return self._checked[key]

    def effective(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return a candidate's DeepSpeed config with defaults filled in."""
        return self._effective if candidate.is_own else self.checked(candidate).effective

    def illegal_reason(self, candidate: Candidate) -> str | None:
        """Return why a candidate is illegal, or None if it is legal.

        It is illegal if DeepSpeed's rules reject its config, or if one of its settings has no effect.
        """
        if candidate.is_own:
            return None
        key = json.dumps(candidate.to_json(), sort_keys=True)
        if key not in self._reasons:
            self._reasons[key] = self.sizes_problem(candidate.settings) or refusal(
                self.checked(candidate), candidate, self._own_warnings
            )
        return self._reasons[key]

    def _structure(self, stage: int, settings: list[tuple[str, Any]]) -> Structure:
        return Structure(stage, with_neutral_values(settings, stage, self.base))


# ---- axes of parallelism as knobs ----------------------------------------------------------------


def efficiency(accumulation: int, num_stages: int) -> float:
    """Return the fraction of a step in which no pipeline stage is idle.

    Source: Huang et al. 2019 (GPipe), section 2.3; the same for 1F1B (Narayanan et al. 2021).
    """
    return accumulation / (accumulation + num_stages - 1)


def enough_accumulation(num_stages: int) -> int:
    """Return how many micro batches per step keep a pipeline nearly 90 % busy."""
    return 1 if num_stages == 1 else _PER_STAGE * num_stages


def _stages_path(paths: Sequence[str], hyperparameters: Mapping[str, Any], sizes: ParallelDims) -> str | None:
    """Return the ``--space`` path that sets the number of pipeline stages, or None."""
    for name in _STAGE_NAMES:
        path = f"{HYPERPARAMETERS}{name}"
        if path in paths and sizes.has_pipeline_engine and hyperparameters.get(name) == sizes.pp:
            return path
    return None


def _redivide_batch(batch: BatchSplit, sizes: ParallelDims, *, is_free: bool) -> BatchSplit:
    micro = batch.micro_batch_size
    if is_free:
        accumulation = max(batch.accumulation, enough_accumulation(sizes.pp))
        return BatchSplit(micro, accumulation, micro * accumulation * sizes.dp)
    return BatchSplit(micro, max(batch.train_batch_size // (micro * sizes.dp), 1), batch.train_batch_size)


def _layers_problem(num_stages: int, hyperparameters: Mapping[str, Any]) -> str | None:
    for name in _LAYER_NAMES:
        num_layers = hyperparameters.get(name)
        if isinstance(num_layers, int) and num_layers % num_stages:
            return f"{num_layers} layers cannot be divided evenly between {num_stages} pipeline stages"
    return None
