"""Settings of a run in its checkpoints, to compare them with a later config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.parallel_dims import AUTOTP_KEY, CONFIG_KEYS, DIM_KEYS, ParallelDims, config_sizes

RESUME_VARIABLE = "DSTRIAL_RESUME"
"""Environment variable with the checkpoint to resume from: a directory, a uuid, or ``latest``."""

FILLED_KEY = "filled_by_arguments"
"""Key of ``EngineRecord.given``: whether a script's arguments fill in settings that are missing in the DeepSpeed config."""

CHECKPOINT_FORMAT = "dstrial"
"""The value of ``format`` in the metadata of dstrial's checkpoints."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineArrangement:
    """An engine's settings that are recorded in a checkpoint's layout and metadata.

    Attributes:
        engine_kind: whether the engine is data-parallel or a pipeline.
        model_parallel_size: number of ranks that share each layer, without pipeline stages.
        zero_stage: ZeRO stage, 0 to 3.
        offload_optimizer: ``none``, ``cpu`` or ``nvme``.
        offload_parameters: ``none``, ``cpu`` or ``nvme``.
        optimizer: class of the optimizer that updates weights, without DeepSpeed's wrapper; empty if none.
        wrapper: class of DeepSpeed's wrapper around the optimizer; empty if none.
        lr_scheduler: class of the learning-rate scheduler; empty if none.
        train_batch_size: records of one optimizer step over all replicas.
        micro_batch_size: records of one forward pass of one replica.
        micro_batches_per_batch: forward passes of one replica per optimizer step (accumulation steps).
        expert_parallel_size: number of ranks that share a layer's experts; 0 without experts.
        sequence_parallel_size: number of ranks that share each sequence (Ulysses).
    """

    engine_kind: Literal["data_parallel", "pipeline"]
    world_size: int
    data_parallel_size: int
    pipeline_stages: int
    model_parallel_size: int
    zero_stage: int
    offload_optimizer: str
    offload_parameters: str
    optimizer: str
    wrapper: str
    lr_scheduler: str
    train_batch_size: int
    micro_batch_size: int
    micro_batches_per_batch: int
    expert_parallel_size: int = dataclasses.field(default=0, kw_only=True)
    sequence_parallel_size: int = dataclasses.field(default=1, kw_only=True)

    @property
    def replica(self) -> ParallelDims:
        sizes = {field: getattr(self, key) for key, field in DIM_KEYS.items()}
        return ParallelDims.of_replica(**sizes, is_pipeline=self.engine_kind == "pipeline")

    def batch_replicas(self, world_size: int, replica: ParallelDims | None = None) -> int:
        """Return the number of replicas in DeepSpeed's batch equation.

        DeepSpeed counts each AutoTP rank as a replica, and the sequence-parallel ranks of a sequence as one replica.

        Args:
            world_size: number of ranks.
            replica: a replica's parallel dimensions; None means those in the checkpoint.
        """
        if replica is not None and replica != self.replica:
            if replica.tp != self.model_parallel_size:  # AutoTP; a user's ``mpu`` must keep its size
                replica = dataclasses.replace(
                    replica, world_size=replica.ranks_per_replica // replica.tp, tp=1
                )
            return replica.replicas_on(world_size)
        counted = self.train_batch_size // (self.micro_batch_size * self.micro_batches_per_batch)
        return max(world_size * counted // self.world_size, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRecord(EngineArrangement):
    """One engine's settings in the metadata of a checkpoint.

    Attributes:
        given: settings in the DeepSpeed config at the run's start: batch sizes, parallel sizes above 1, and the types of
            ``optimizer`` and ``scheduler``; empty if unknown.
        micro_batch_limit: micro batch size at the run's start, which is known to fit into memory.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    micro_batch_limit: int = 0

    def replica_with(self, section: Any, config: Mapping[str, Any] | None) -> ParallelDims:
        """Return the parallel dimensions of one replica in a resumed run.

        Sizes in the DeepSpeed config take precedence over those in ``data.dstrial``, and these over those in the checkpoint. A
        size that the config had at the run's start, and that neither source has now, is 1.

        Args:
            section: the value of ``data.dstrial``; ignored unless a mapping.
            config: the DeepSpeed config; None if unknown. Ignored for a pipeline engine.
        """
        sizes = dict(section) if isinstance(section, Mapping) else {}
        if config is not None and self.engine_kind != "pipeline":
            no_longer_given = {key: 1 for path, key in CONFIG_KEYS.items() if path in self.given}
            sizes = {**no_longer_given, **sizes, **config_sizes(config)}
        return self.replica.with_section(sizes)

    @property
    def own_batch(self) -> dict[str, Any]:
        """A minimal DeepSpeed config that results in the saved ``train_batch_size``."""
        return {BATCH_KEYS[0]: self.train_batch_size, AUTOTP_KEY: self.given.get(AUTOTP_KEY, 1)}

    def counted_for(self, config: Mapping[str, Any]) -> EngineRecord:
        """Return this record with ``train_batch_size`` for a config's ``autotp_size``.

        DeepSpeed counts a training sample once per AutoTP rank. ``config`` is a DeepSpeed config, or settings as in ``given``.
        Return the record itself if the size is unchanged, or if the ranks are not AutoTP ranks.
        """
        was = self.given.get(AUTOTP_KEY, 1)
        size = config.get(AUTOTP_KEY) or config_sizes(config).get("model_parallel_size", 1)
        if self.engine_kind == "pipeline" or was == size or self.model_parallel_size not in (1, was):
            return self
        given = {key: value for key, value in self.given.items() if key != BATCH_KEYS[0]}
        return dataclasses.replace(self, train_batch_size=self.train_batch_size // was * size, given=given)

    @classmethod
    def from_layout(cls, layout: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> EngineRecord:
        """Build a record from a manifest's layout, or from the result of :meth:`to_json`.

        ``more`` has the fields that a layout lacks: ``given`` and ``micro_batch_limit``.

        Raises:
            KeyError: a value is missing.
        """
        whole = {**layout, **(more or {})}
        values = {
            field.name: whole[field.name]
            for field in dataclasses.fields(cls)
            if field.name in whole
            or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        }
        values["given"] = dict(whole.get("given") or {})
        values["micro_batch_limit"] = int(whole.get("micro_batch_limit") or whole["micro_batch_size"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "given": dict(self.given)}


@dataclasses.dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint and the run that wrote it.

    Attributes:
        checkpoint: the checkpoint's uuid or directory, for messages.
        steps_completed: number of trained batches.
        trial_id: id of the trial that wrote the checkpoint; None if unknown.
        engines: the trial's engines, in the order in which the trial wraps them.
        keeps_batch: whether the run itself is resumed with its batch size and counters; False if only weights are loaded.
    """

    checkpoint: str
    steps_completed: int
    trial_id: int | None
    engines: tuple[EngineRecord, ...]
    keeps_batch: bool = True

    @classmethod
    def from_metadata(cls, checkpoint: str, metadata: Mapping[str, Any]) -> SavedRun | None:
        """Read a saved run from metadata; None if dstrial did not write the checkpoint."""
        engines = metadata.get("engines")
        if metadata.get("format") != CHECKPOINT_FORMAT or not isinstance(engines, Sequence):
            return None
        try:
            # Determined stores metadata as JSON, in which a whole number may come back as 2.0.
            read = tuple(EngineRecord.from_layout(_whole_numbers(values)) for values in engines)
        except (KeyError, TypeError):
            return None
        trial_id = metadata.get("trial_id")
        return cls(
            checkpoint=checkpoint,
            steps_completed=int(metadata.get("steps_completed") or 0),
            trial_id=None if trial_id is None else int(trial_id),
            engines=read,
        )

    def of_trial(self, trial_id: int) -> SavedRun:
        """Return a copy in which ``keeps_batch`` is set for a resume by ``trial_id``.

        ``keeps_batch`` is True if trial ``trial_id`` wrote the checkpoint. Otherwise only the weights will be loaded.
        """
        return dataclasses.replace(self, keeps_batch=self.trial_id == trial_id)


def run_metadata(engines: Sequence[EngineRecord], trial_id: int) -> dict[str, Any]:
    """Return the checkpoint metadata that :meth:`SavedRun.from_metadata` reads."""
    return {
        "format": CHECKPOINT_FORMAT,
        "trial_id": trial_id,
        "engines": [engine.to_json() for engine in engines],
    }


def given_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config's settings for ``EngineRecord.given``.

    These are batch sizes, parallel sizes above 1, and the types of ``optimizer`` and ``scheduler``.
    """
    given = {key: config[key] for key in BATCH_KEYS if isinstance(config.get(key), int)}
    sizes = config_sizes(config)
    given |= {path: sizes[key] for path, key in CONFIG_KEYS.items() if sizes.get(key, 1) > 1}
    for section in ("optimizer", "scheduler"):
        value = config.get(section)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(kind, str):
            given[section] = kind
    return given


def given_sizes(given: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Return a config's batch sizes in the order of ``BATCH_KEYS``.

    A size is None if it is missing or no integer, such as ``"auto"``.
    """
    total, micro, steps = (
        value if isinstance(value := given.get(key), int) and not isinstance(value, bool) else None
        for key in BATCH_KEYS
    )
    return total, micro, steps


def _whole_numbers(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _whole_numbers(value) for key, value in values.items()}
    return int(values) if isinstance(values, float) and values.is_integer() else values
