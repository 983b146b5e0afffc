"""The search space: DeepSpeed keys that vary (*knobs*), legal configurations.

A *structure* is a configuration without its batch sizes. ``dstrial.config.deepspeed_rules.check`` alone decides whether a
configuration is legal and whether a key has any effect.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.deepspeed_rules.check import CheckResult, check_deepspeed
from dstrial.config.deepspeed_rules.ignored import zero_keys_without_effect
from dstrial.config.dotted_keys import value_at
from dstrial.config.merge import merge_deepspeed
from dstrial.config.parallel_dims import AUTOTP_KEY, ParallelDims
from dstrial.dsat.core.candidate import (
    HYPERPARAMETERS,
    BatchSizeGrid,
    BatchSplit,
    Candidate,
    changes_in_words,
)
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.search.sampling import SearchRandom

ZERO = "zero_optimization"
ALL_STAGES = (0, 1, 2, 3)  # of ZeRO

_BUCKETS = tuple(factor * 10**power for power in (6, 7, 8, 9) for factor in (1, 5))  # numbers of elements
_SWITCH = (True, False)

_MAX_CHECKED = 1024  # cached checks of configurations; callers ask several times in a row about the same one
_STAGE_NAMES = ("pipeline_stages", "num_stages", "pipe_parallel_size")
"""Names of hyperparameters that count as a trial's number of pipeline stages if they equal ``data.dstrial.pipeline_stages``."""
_LAYER_NAMES = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")
"""Names of hyperparameters that count as a model's number of layers, which pipeline stages divide."""

_AXES = {AUTOTP_KEY: "tp", "sequence_parallel_size": "sp"}
"""Path of ``--space`` that sets a parallel dimension -> field of ``ParallelDims``."""
_PER_STAGE = 8  # micro batches per step and pipeline stage that keep the stages busy
_BUSY = 8 / 9  # least share of busy stages with so many micro batches: 8 P / (9 P - 1) for P stages


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """A DeepSpeed key or hyperparameter, with the values that a search tries."""

    path: str  # dotted key of DeepSpeed's JSON, or ``hyperparameters.<name>`` of the trial
    values: tuple[Any, ...]  # by ascending device memory, if the values differ in it
    stages: tuple[int, ...] = ALL_STAGES  # stages in which DeepSpeed reads the key
    in_pipeline: bool = True  # whether a pipeline engine reads the key
    grows_memory: bool = False  # a larger value needs more device memory
    counts_params: bool = False  # a number of parameters; values above the model's only reserve more memory
    is_drawn: bool = True  # whether random methods vary it; not if it saves memory but costs much time


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
"""Paths whose effect on time and memory the predictor computes; ``--space`` may add others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A configuration without its batch sizes: a ZeRO stage and settings."""

    stage: int
    settings: tuple[tuple[str, Any], ...]  # (dotted path, value), sorted


class Space:
    """The configurations that may be measured for one experiment.

    Args:
        base: the user's DeepSpeed config, merged from all its sources.
        sizes: sizes of the parallel dimensions.
        stages: ZeRO stages to try.
        train_batch_size: global batch size to use instead of that of ``base``.
        free_batch: the global batch size may change with the micro batch size.
        extra: path -> values to try, from ``--space``; they replace a knob's values or add a knob.
        hyperparameters: hyperparameters of the experiment.

    Raises:
        ConfigError: the batch sizes of the config contradict each other, or cannot be divided by the replicas.
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
        self.own_stage: int = checked.effective[ZERO]["stage"] or 0
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
        self.stages = tuple(stage for stage in sorted(set(stages)) if stage in legal) or (self.own_stage,)
        self._reasons: dict[str, str | None] = {}
        self._refusals: dict[tuple[int, str, str], str | None] = {}
        self._checked: dict[str, CheckResult] = {}

    @property
    def bytes_per_value(self) -> int:
        """Bytes of a parameter or gradient: 2 in half precision (fp16 or bf16), else 4."""
        return width_of(self._effective)

    def own(self) -> Candidate:
        """Return the user's own configuration."""
        return Candidate(self.own_stage, (), self._own_batch, is_own=True)

    def smallest(self) -> Candidate:
        """Return the user's own configuration with the smallest micro batch."""
        return Candidate(self.own_stage, (), self.batch_size_grid.split(0))

    def knobs(self, stage: int) -> tuple[Knob, ...]:
        """Return the keys that vary in a ZeRO stage, each with the values to try.

        These are the keys that dsat varies by default, and those of ``--space`` that have a legal value in this stage.
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
        """Return a configuration's value of a key or hyperparameter; None if unset.

        A default of DeepSpeed counts as set.
        """
        if path.startswith(HYPERPARAMETERS):
            own = value_at(self._hyperparameters, path.removeprefix(HYPERPARAMETERS))
            return dict(candidate.settings).get(path, own)
        return value_at(self.effective(candidate), path)

    def rejection_reason(self, path: str, value: Any) -> str | None:
        """Return why no ZeRO stage accepts a value of ``--space``; None if a stage does."""
        reasons = [self._refusal(stage, path, value) for stage in self.stages]
        return None if None in reasons else reasons[-1]

    def _refusal(self, stage: int, path: str, value: Any) -> str | None:
        """Return why a ZeRO stage rejects a value of a path; None if the stage accepts it.

        A value is accepted if it is legal alone, or together with one other value of ``--space``.
        """
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
        """Return random settings of a ZeRO stage.

        Bucket and other sizes above ``num_params``, the model's number of parameters, count as one value.
        """
        settings = []
        for knob in self.knobs(stage):
            if knob.is_drawn:
                values = useful_values(knob, num_params)
                settings.append((knob.path, values[random.integer_below(len(values))]))
        return self._structure(stage, settings)

    def describe(self, candidate: Candidate) -> str:
        """Return a line of text: stage, batch, changes to the user's own configuration."""
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
        """Yield the settings of every combination of the knobs' values, legal or not."""
        for values in itertools.product(*(knob.values for knob in knobs)):
            yield self._structure(stage, list(zip((knob.path for knob in knobs), values, strict=True)))

    def first_position(self, last: int) -> int:
        """Return the index of the micro batch size to try first, at most ``last``.

        The index is that of ``batch_size_grid``. For a pipeline this is the largest micro batch that leaves enough micro
        batches per step to keep the stages busy; otherwise it is ``last``.
        """
        num_stages, batches = self.sizes.pp, self.batch_size_grid
        if num_stages == 1 or batches.is_free:
            return last
        positions = range(last + 1)
        full = [at for at in positions if efficiency(batches.split(at).accumulation, num_stages) > _BUSY]
        return full[-1] if full else 0

    def candidate(self, structure: Structure, position: int) -> Candidate:
        """Return the configuration with these settings and a micro batch size.

        ``position`` is the index of the micro batch size in ``batch_size_grid``.
        """
        batch = self.batch_size_grid.split(position)
        if self.axes and not self.sizes_problem(structure.settings):
            sizes = self._sizes(structure.settings)
            if sizes.dp != self.sizes.dp:
                # Other sizes mean another number of replicas, which divide the same batch.
                batch = _redivide_batch(batch, sizes, is_free=self.batch_size_grid.is_free)
        return Candidate(structure.stage, structure.settings, batch)

    def sizes_of(self, candidate: Candidate) -> ParallelDims:
        """Return the sizes of a configuration's parallel dimensions.

        If its sizes cannot divide the ranks or layers, those of the user's own configuration are returned.
        """
        if not self.axes or self.sizes_problem(candidate.settings) is not None:
            return self.sizes
        return self._sizes(candidate.settings)

    def sizes_problem(self, settings: Sequence[tuple[str, Any]]) -> str | None:
        """Return why the parallel sizes in ``settings`` are impossible; None if possible.

        They must divide the ranks, and pipeline stages must divide the layers.
        """
        try:
            num_stages = self._sizes(settings).pp
        except ValueError as error:
            return str(error)
        is_own = num_stages == self.sizes.pp
        return None if is_own else _layers_problem(num_stages, self._hyperparameters)

    def _sizes(self, settings: Sequence[tuple[str, Any]]) -> ParallelDims:
        """Return the parallel sizes of ``settings``; raise ValueError if impossible."""
        changed = {self.axes[path]: value for path, value in settings if path in self.axes}
        for value in changed.values():
            if type(value) is not int:
                raise ValueError(f"a parallel dimension is {value!r}; expected a whole number. Correct it.")
        return dataclasses.replace(self.sizes, is_pipeline=self.sizes.has_pipeline_engine, **changed)

    def config(self, candidate: Candidate) -> dict[str, Any]:
        """Return a configuration's DeepSpeed config, without keys that its stage ignores."""
        merged = merge_deepspeed(self.base, candidate.overwrite())
        drop_dead_keys(merged, candidate.stage)
        return merged

    def checked(self, candidate: Candidate) -> CheckResult:
        """Return the result of DeepSpeed's rules for a configuration, from a cache."""
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
        """Return a configuration's DeepSpeed config with defaults filled in."""
        return self._effective if candidate.is_own else self.checked(candidate).effective

    def illegal_reason(self, candidate: Candidate) -> str | None:
        """Return why a configuration is illegal; None if it is legal.

        It is illegal if DeepSpeed's rules reject it, or if one of its settings has no effect.
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
    """Return the micro batches per step that keep a pipeline nearly 90 % busy."""
    return 1 if num_stages == 1 else _PER_STAGE * num_stages


def _stages_path(paths: Sequence[str], hyperparameters: Mapping[str, Any], sizes: ParallelDims) -> str | None:
    """Return the path of ``--space`` that sets the number of pipeline stages, or None."""
    for name in _STAGE_NAMES:
        path = f"{HYPERPARAMETERS}{name}"
        if path in paths and sizes.has_pipeline_engine and hyperparameters.get(name) == sizes.pp:
            return path
    return None


def _redivide_batch(batch: BatchSplit, sizes: ParallelDims, *, is_free: bool) -> BatchSplit:
    """Return batch sizes with the same micro batch for another number of replicas."""
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


# ---- knobs --------------------------------------------------------------------------------------


def useful_values(knob: Knob, num_params: float | None) -> tuple[Any, ...]:
    """Return the values of a DeepSpeed key that a search tries.

    Sizes above ``num_params``, the model's number of parameters (None: unknown), have the same effect. So only the smallest of
    them is returned.
    """
    if not knob.counts_params or num_params is None:
        return knob.values
    below = tuple(value for value in knob.values if value <= num_params)
    return (*below, *sorted(value for value in knob.values if value > num_params)[:1])


def live_knobs(stage: int, *, is_pipeline: bool) -> tuple[Knob, ...]:
    """Return the keys to vary that DeepSpeed reads in a ZeRO stage."""
    return tuple(knob for knob in KNOBS if stage in knob.stages and (knob.in_pipeline or not is_pipeline))


def drop_dead_keys(merged: dict[str, Any], stage: int) -> None:
    """Remove the keys of a DeepSpeed config that a ZeRO stage does not read, in place.

    Also removes sections of offloading to the device ``none``.
    """
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
    """Return ``settings``, sorted, with the user's offloading off if it is illegal.

    ``base`` is the user's DeepSpeed config. Its offloading is disabled if the ZeRO stage rejects it.
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
    """Return why a configuration is illegal; None if it is legal.

    ``found`` is the result of DeepSpeed's rules for the configuration, which is illegal if ``found`` has an error. It is also
    illegal if one of its settings has no effect. ``own_warnings`` are warnings about the user's own config, which are ignored.
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
    """Return the bytes of a parameter or gradient: 2 for fp16 or bf16, else 4.

    ``effective`` is a DeepSpeed config with defaults filled in.
    """
    return 2 if effective["fp16"]["enabled"] or effective["bf16"]["enabled"] else 4
