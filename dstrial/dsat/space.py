"""What is searched: structures (ZeRO stage and live knobs) and how the batch is divided. Pure.

Whether a configuration is legal, and whether a key in it does anything, is decided by
``dstrial.config.check_deepspeed`` alone.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dstrial.config import ParallelSizes, check_deepspeed, merge_deepspeed, zero_keys_without_effect
from dstrial.dsat.candidate import HYPERPARAMETERS, BatchSplit, Candidate
from dstrial.dsat.knobs import ALL_STAGES, ZERO, Knob, legal_stages, live_knobs, useful_values
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.search.random_state import SearchRandom

_LARGEST_FREE_MICRO_BATCH = 4096


class Ladder:
    """The micro batches that may be tried, in ascending order, by position.

    Args:
        train_batch_size: records of one optimizer step; None lets it follow the micro batch (``--free-batch``).
        replicas: number of replicas.
        accumulation: the user's accumulation, kept where the batch is free.
    """

    def __init__(self, train_batch_size: int | None, replicas: int, accumulation: int) -> None:
        self._train_batch_size = train_batch_size
        self._replicas = replicas
        self._accumulation = accumulation
        per_replica = (train_batch_size or 0) // replicas
        self._divisors = tuple(size for size in range(1, per_replica + 1) if per_replica % size == 0)

    @property
    def is_free(self) -> bool:
        """Whether the global batch changes with the micro batch."""
        return self._train_batch_size is None

    @property
    def last(self) -> int:
        """The last position, from 0."""
        return _LARGEST_FREE_MICRO_BATCH - 1 if self.is_free else len(self._divisors) - 1

    def split(self, position: int) -> BatchSplit:
        """Return the batch at a position, 0 to ``last``."""
        if self._train_batch_size is None:
            micro = position + 1
            return BatchSplit(micro, self._accumulation, micro * self._accumulation * self._replicas)
        micro = self._divisors[position]
        return BatchSplit(micro, self._train_batch_size // (micro * self._replicas), self._train_batch_size)

    def position(self, micro_batch_size: float) -> int:
        """Return the position of the largest micro batch that is not above a size; 0 if all are."""
        if self.is_free:
            return max(0, min(int(micro_batch_size), _LARGEST_FREE_MICRO_BATCH) - 1)
        below = [position for position, size in enumerate(self._divisors) if size <= micro_batch_size]
        return below[-1] if below else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """Everything of a configuration but its batch.

    Attributes:
        stage: ZeRO stage.
        settings: (dotted path, value) pairs in the order of their paths.
    """

    stage: int
    settings: tuple[tuple[str, Any], ...]


class Space:
    """The configurations that may be measured for one experiment.

    Args:
        base: the user's DeepSpeed config, merged; not changed.
        sizes: ranks and their division.
        stages: ZeRO stages that may be tried.
        train_batch_size: the global batch to keep; None for the config's own.
        free_batch: whether the global batch follows the micro batch instead.
        extra: ``--space``: path -> values, instead of a knob's own or for a new one.

    Raises:
        ConfigError: the config has no solvable batch, or the batch cannot be shared by the replicas.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        sizes: ParallelSizes,
        *,
        stages: Sequence[int] = (1, 2, 3),
        train_batch_size: int | None = None,
        free_batch: bool = False,
        extra: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
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
        self.ladder = Ladder(
            None if free_batch else batch.train_batch_size,
            batch.data_parallel_size,
            batch.gradient_accumulation_steps,
        )
        self.replicas = batch.data_parallel_size
        legal = legal_stages(is_pipeline=sizes.has_pipeline_engine)
        self.stages = tuple(stage for stage in sorted(set(stages)) if stage in legal) or (self._stage,)
        self._reasons: dict[str, str | None] = {}

    @property
    def own_stage(self) -> int:
        """The ZeRO stage of the user's own configuration."""
        return self._stage

    @property
    def bytes_per_value(self) -> int:
        """2 for a model in half precision (fp16 or bf16), else 4."""
        effective = self._effective
        return 2 if effective["fp16"]["enabled"] or effective["bf16"]["enabled"] else 4

    def own(self) -> Candidate:
        """Return the user's own configuration."""
        return Candidate(self._stage, (), self._own_batch, is_own=True)

    def smallest(self) -> Candidate:
        """Return the user's own structure with the smallest micro batch."""
        return Candidate(self._stage, (), self.ladder.split(0))

    def knobs(self, stage: int) -> tuple[Knob, ...]:
        """Return what may be changed in a stage: live knobs with their values, and those of ``--space``."""
        known = live_knobs(stage, is_pipeline=self.sizes.has_pipeline_engine)
        everywhere = {knob.path for one in ALL_STAGES for knob in live_knobs(one, is_pipeline=False)}
        result = [
            dataclasses.replace(knob, values=self.extra[knob.path], is_drawn=True)
            if knob.path in self.extra
            else knob
            for knob in known
        ]
        result += [Knob(path, values) for path, values in self.extra.items() if path not in everywhere]
        return tuple(sorted(result, key=lambda knob: knob.path))

    def draw(self, random: SearchRandom, stage: int, num_params: float | None = None) -> Structure:
        """Draw one value of every knob that the random methods draw.

        Args:
            random: where from.
            stage: ZeRO stage.
            num_params: parameters of the model, above which sizes do not differ; None to draw from all values.
        """
        settings = []
        for knob in self.knobs(stage):
            if knob.is_drawn:
                values = useful_values(knob, num_params)
                settings.append((knob.path, values[random.integer_below(len(values))]))
        return self._structure(stage, settings)

    def describe(self, candidate: Candidate) -> str:
        """Say in one line what a candidate is: its batch, and what it changes in the user's own configuration."""
        batch = candidate.batch
        words = [f"stage {candidate.stage}, micro batch {batch.micro_batch_size} x {batch.accumulation}"]
        for path, value in candidate.settings:
            if path.startswith(HYPERPARAMETERS) or _walk(self._effective, path) != value:
                words.append(
                    f"{path.rpartition('.')[2] if '.device' not in path else path[18:]}={_short(value)}"
                )
        return ", ".join(words)

    def structures(self, stage: int, knobs: Sequence[Knob] | None = None) -> Iterator[Structure]:
        """Yield every combination of some knobs' values in a stage; legal or not.

        Args:
            stage: ZeRO stage.
            knobs: those to combine; all of the stage if None, which may be tens of thousands.
        """
        chosen = self.knobs(stage) if knobs is None else tuple(knobs)
        for values in itertools.product(*(knob.values for knob in chosen)):
            yield self._structure(stage, list(zip((knob.path for knob in chosen), values, strict=True)))

    def candidate(self, structure: Structure, position: int) -> Candidate:
        """Return a structure with the micro batch at a position of the ladder."""
        return Candidate(structure.stage, structure.settings, self.ladder.split(position))

    def config(self, candidate: Candidate) -> dict[str, Any]:
        """Return the whole DeepSpeed config of a candidate, without keys that do nothing in it and for autotuning."""
        merged = merge_deepspeed(self.base, candidate.overwrite())
        zero = merged.get(ZERO)
        if isinstance(zero, dict):
            for key in zero_keys_without_effect(candidate.stage):
                zero.pop(key, None)
            for section in ("offload_optimizer", "offload_param"):
                offload = zero.get(section)
                if isinstance(offload, Mapping) and offload.get("device", "none") in (None, "none"):
                    del zero[section]
        return merged

    def illegal(self, candidate: Candidate) -> str | None:
        """Say why DeepSpeed would refuse a candidate, or what in it would have no effect; None if it is legal."""
        if candidate.is_own:
            return None
        key = json.dumps(candidate.to_json(), sort_keys=True)
        if key not in self._reasons:
            self._reasons[key] = self._reason(candidate)
        return self._reasons[key]

    def _reason(self, candidate: Candidate) -> str | None:
        # Keys of the user's that are dead in another stage are harmless, so they are not looked at.
        merged = self.config(candidate)
        found = check_deepspeed(merged, self.sizes, auto="warning")
        if found.problems:
            return str(found.problems[0])
        changed = {path for path, _ in candidate.settings}
        dead = [
            warning
            for warning in found.warnings
            if warning not in self._own_warnings and any(f"{path} " in warning for path in changed)
        ]
        dead += [
            f"{ZERO}.{key} has no effect in stage {candidate.stage}"
            for key in zero_keys_without_effect(candidate.stage)
            if f"{ZERO}.{key}" in changed
        ]
        return dead[0] if dead else None

    def identity(self, candidate: Candidate) -> str:
        """Return a text that is equal for candidates with which DeepSpeed would do the same."""
        merged = self.config(candidate)
        effective = check_deepspeed(merged, self.sizes, auto="warning").effective
        zero = dict(effective[ZERO])
        for key in zero_keys_without_effect(candidate.stage):
            zero.pop(key, None)
        for section in ("offload_optimizer", "offload_param"):
            offload = zero.get(section)
            if isinstance(offload, Mapping) and offload.get("device") in (None, "none"):
                zero.pop(section)
        return json.dumps(
            [{**effective, ZERO: zero}, candidate.hyperparameters()], sort_keys=True, default=str
        )

    def _structure(self, stage: int, settings: list[tuple[str, Any]]) -> Structure:
        values = dict(settings)
        zero = self.base.get(ZERO)
        given = zero if isinstance(zero, Mapping) else {}
        # What the user's own config has and another stage refuses is set to its neutral value.
        for section, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
            if given.get(section) and stage not in stages:
                values.setdefault(f"{ZERO}.{section}.device", "none")
        optimizer = given.get("offload_optimizer")
        if isinstance(optimizer, Mapping) and optimizer.get("ratio", 1) != 1 and stage != 3:
            values.setdefault(f"{ZERO}.offload_optimizer.ratio", 1.0)
        if values.get(f"{ZERO}.offload_optimizer.device", "cpu") == "none":
            values.pop(f"{ZERO}.offload_optimizer.ratio", None)
        return Structure(stage, tuple(sorted(values.items())))


def read_space(path: Path, hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read ``--space FILE``: a YAML or JSON mapping of dotted paths to lists of values.

    Args:
        path: the file.
        hyperparameters: of the experiment; a path that begins with ``hyperparameters.`` must be one of them.

    Raises:
        ConfigError: with all problems of the file.
    """
    problems: list[ConfigProblem] = []
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        fix = "Pass a YAML or JSON file with paths and lists of values."
        raise ConfigError([ConfigProblem("--space", f"{path} ({reason})", "a readable file", fix)]) from error
    if not isinstance(given, Mapping):
        fix = "Write zero_optimization.sub_group_size: [1e8, 1e9], for example."
        raise ConfigError([ConfigProblem(f"{path}", repr(given), "a mapping of paths to lists", fix)])
    result: dict[str, tuple[Any, ...]] = {}
    for key, values in given.items():
        name = str(key)
        if not isinstance(values, list) or not values:
            problems.append(
                ConfigProblem(
                    f"{path}: {name}", repr(values), "a list with at least one value", "List the values."
                )
            )
            continue
        hyperparameter = name.removeprefix(HYPERPARAMETERS)
        if name != hyperparameter and hyperparameter.split(".")[0] not in hyperparameters:
            fix = f"Add {hyperparameter} to the hyperparameters of the experiment, and read it in the trial."
            problems.append(ConfigProblem(f"{path}: {name}", "no hyperparameter", "a declared one", fix))
            continue
        result[name] = tuple(_whole(value) for value in values)
    if problems:
        raise ConfigError(problems)
    return result


def _walk(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:.0e}".replace("e+0", "e")
    return str(value)


def _whole(value: Any) -> Any:
    """YAML reads 1e9 as text and 1.0e9 as a float; sizes are integers."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1000 else value
