"""The search space: keys that a search varies (*knobs*), and legal configurations.

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

_MAX_CHECKED = 1024  # size limit of the cache of checks; callers repeat the check of one configuration
_STAGE_NAMES = ("pipeline_stages", "num_stages", "pipe_parallel_size")
"""Names of hyperparameters that count as a trial's number of pipeline stages if they equal ``data.dstrial.pipeline_stages``."""
_LAYER_NAMES = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")
"""Names of hyperparameters that count as a model's number of layers, which pipeline stages divide."""

_AXES = {AUTOTP_KEY: "tp", "sequence_parallel_size": "sp"}
"""Path of ``--space`` that sets a parallel dimension -> field of ``ParallelDims``."""
_PER_STAGE = 8  # micro batches per step and pipeline stage that keep the stages busy
_BUSY = 8 / 9  # lower bound of a pipeline's ``efficiency`` with ``_PER_STAGE``: 8 P / (9 P - 1) for P stages


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """A DeepSpeed key or hyperparameter, with the values that a search tries."""

    path: str  # dotted key of DeepSpeed's JSON, or ``hyperparameters.<name>`` of the trial
    values: tuple[Any, ...]  # the values to try
    stages: tuple[int, ...] = ALL_STAGES  # stages in which DeepSpeed reads the key
    in_pipeline: bool = True  # whether a pipeline engine reads the key
    grows_memory: bool = False  # a larger value needs more device memory
    counts_params: bool = False  # values are numbers of parameters; above the model's they only cost memory
    is_drawn: bool = True  # whether random search varies the key; False if it trades much time for memory


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
        free_batch: whether the global batch size may change with the micro batch size; if False, the global size is fixed.
        extra: path -> values to try, from ``--space``. For a default knob they replace its values; other paths become new
            knobs.
        hyperparameters: hyperparameters of the experiment.

    Raises:
        ConfigError: ``base`` is illegal, for example has contradictory batch sizes; or ``base`` enables AutoTP, and ``extra``
            varies its size.
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
        """Bytes per element of weights and gradients: 2 for fp16 or bf16, else 4."""
        return width_of(self._effective)

    def own(self) -> Candidate:
        """Return the user's own configuration."""
        return Candidate(self.own_stage, (), self._own_batch, is_own=True)

    def smallest(self) -> Candidate:
        """Return the user's own configuration with the grid's smallest micro batch size."""
        return Candidate(self.own_stage, (), self.batch_size_grid.split(0))

    def knobs(self, stage: int) -> tuple[Knob, ...]:
        """Return the knobs of a ZeRO stage, each with the values to try.

        These are the default knobs of the stage, and the knobs of ``--space`` that have a legal value in the stage.
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
        """Return the value of a key or hyperparameter in a configuration.

        For a DeepSpeed key that the configuration does not set, this is DeepSpeed's default; None without a default.
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
        """Return why a ZeRO stage rejects a knob's value; None if the stage accepts it.

        The stage accepts a value that is legal as the only change, or together with one value of another knob of ``--space``.
        Values of hyperparameters are always accepted.
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
        """Return a structure with a random value for each knob of a ZeRO stage.

        Knobs with ``is_drawn`` false are left out. ``num_params`` is the model's number of parameters, as in ``useful_values``.
        """
        settings = []
        for knob in self.knobs(stage):
            if knob.is_drawn:
                values = useful_values(knob, num_params)
                settings.append((knob.path, values[random.integer_below(len(values))]))
        return self._structure(stage, settings)

    def describe(self, candidate: Candidate) -> str:
        """Return one line of text: ZeRO stage, batch sizes, changes to the user's config."""
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
        """Yield a structure for each combination of the knobs' values, legal or not."""
        for values in itertools.product(*(knob.values for knob in knobs)):
            yield self._structure(stage, list(zip((knob.path for knob in knobs), values, strict=True)))

    def first_position(self, last: int) -> int:
        """Return the index of the micro batch size to try first, at most ``last``.

        Both are indices into ``batch_size_grid``. For a pipeline with a fixed global batch size, the largest size that
        leaves enough micro batches per step to keep the stages busy; 0 if there is none. Otherwise ``last``.
        """
        num_stages, batches = self.sizes.pp, self.batch_size_grid
        if num_stages == 1 or batches.is_free:
            return last
        positions = range(last + 1)
        full = [at for at in positions if efficiency(batches.split(at).accumulation, num_stages) > _BUSY]
        return full[-1] if full else 0

    def candidate(self, structure: Structure, position: int) -> Candidate:
        """Return the configuration with a structure's settings and a micro batch size.

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

        If they are impossible (see ``sizes_problem``), the sizes of the user's own configuration are returned.
        """
        if not self.axes or self.sizes_problem(candidate.settings) is not None:
            return self.sizes
        return self._sizes(candidate.settings)

    def sizes_problem(self, settings: Sequence[tuple[str, Any]]) -> str | None:
        """Return why the parallel sizes in ``settings`` are impossible; None if possible.

        The number of ranks must be divisible by the sizes, and the number of layers by the number of pipeline stages.
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
        """Return the DeepSpeed config of ``candidate``, without keys its stage ignores."""
        merged = merge_deepspeed(self.base, candidate.overwrite())
        drop_dead_keys(merged, candidate.stage)
        return merged

    def checked(self, candidate: Candidate) -> CheckResult:
        """Return the (cached) result of ``check_deepspeed`` for a configuration."""
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

        A configuration is illegal if its parallel sizes are impossible, or DeepSpeed's rules reject its config. A configuration
        with a setting that has no effect is illegal too. The user's own configuration counts as legal.
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
    """Return the fraction of a step's time in which a pipeline stage is not idle.

    ``accumulation`` is the number of micro batches per step.

    Source: Huang et al. 2019 (GPipe), section 2.3; the same for 1F1B (Narayanan et al. 2021).
    """
    return accumulation / (accumulation + num_stages - 1)


def enough_accumulation(num_stages: int) -> int:
    """Return how many micro batches per step keep the stages busy for 8/9 of the time.

    1 without a pipeline (``num_stages`` is 1).
    """
    return 1 if num_stages == 1 else _PER_STAGE * num_stages


def _stages_path(paths: Sequence[str], hyperparameters: Mapping[str, Any], sizes: ParallelDims) -> str | None:
    """Return the path in ``--space`` of the hyperparameter with the number of stages.

    None if the engine is no pipeline, or if no such hyperparameter equals the current number of pipeline stages.
    """
    for name in _STAGE_NAMES:
        path = f"{HYPERPARAMETERS}{name}"
        if path in paths and sizes.has_pipeline_engine and hyperparameters.get(name) == sizes.pp:
            return path
    return None


def _redivide_batch(batch: BatchSplit, sizes: ParallelDims, *, is_free: bool) -> BatchSplit:
    """Adapt batch sizes to another number of replicas; keep the micro batch size.

    If ``is_free``, the global batch size follows the number of replicas; otherwise the gradient accumulation does.
    """
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
    """Return a knob's values without those that have the same effect as another value.

    For a knob with ``counts_params``, all values above ``num_params`` (the model's number of parameters) have the same effect.
    Only the smallest of them is returned. If ``num_params`` is None (unknown), all values are returned.
    """
    if not knob.counts_params or num_params is None:
        return knob.values
    below = tuple(value for value in knob.values if value <= num_params)
    return (*below, *sorted(value for value in knob.values if value > num_params)[:1])


def live_knobs(stage: int, *, is_pipeline: bool) -> tuple[Knob, ...]:
    """Return the default knobs that DeepSpeed reads in a ZeRO stage."""
    return tuple(knob for knob in KNOBS if stage in knob.stages and (knob.in_pipeline or not is_pipeline))


def drop_dead_keys(merged: dict[str, Any], stage: int) -> None:
    """Remove, in place, the keys of a DeepSpeed config that a ZeRO stage ignores.

    The sections ``offload_optimizer`` and ``offload_param`` are also removed if their device is ``none``.
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
    """Return sorted ``settings`` that also disable offloading if the stage rejects it.

    ``base`` is the user's DeepSpeed config. Settings are added for its offloading sections that ZeRO ``stage`` does not allow.
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

    A configuration is illegal if ``found``, its result of ``check_deepspeed``, has a problem, or if one of its settings has no
    effect. ``own_warnings`` are the warnings about the user's own configuration, which are ignored.
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
    """Return the bytes per element of weights and gradients: 2 or 4.

    2 if fp16 or bf16 is enabled.

    ``effective`` is a DeepSpeed config with defaults filled in.
    """
    return 2 if effective["fp16"]["enabled"] or effective["bf16"]["enabled"] else 4
