"""Dry-run a DeepSpeedTrial's own construction and steps, without training it.

Construction runs for real, so that data may be read as usual, but parameters keep their shapes only and
``deepspeed.initialize`` answers with a stand-in. The training loader gives its first batches, and the largest of them lends
its shapes.
Then the parameters are made again as fake tensors, the real engine is built behind the stand-in, and the trial's own
``train_batch`` runs. Where code cannot do without values, the dry run names its line and one real batch is measured instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import PipelineEngine
from determined import core, pytorch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dstrial.engine.checkpoint_reader.safe_load import load
from dstrial.engine.deepspeed_internals.engines import (
    compute_dtype,
    earlier_layers,
    leave_out_shapes,
)
from dstrial.engine.dryrun.fake_world import CapturedInitialize, FakeWorld
from dstrial.errors import TrialContractError
from dstrial.launch.trial_import import import_trial
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.runtime import ModelParallelUnit

_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


class TrialWorkload:
    """A DeepSpeedTrial as a dry run's ``engine.dryrun.measure.Workload``."""

    def __init__(self, world: FakeWorld, trial: str, context_dir: str, num_stages: int = 1) -> None:
        self._trial_name = trial
        self._is_fake = world.is_fake
        self.num_stages = num_stages
        self._calls: list[CapturedInitialize] = []
        self._pipelines: list[PipelineEngine] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(world.before_engines(self._capture))
            deepspeed.init_distributed(auto_mpi_discovery=False)  # a PipelineModule places its layers by it
            self._trial_class = import_trial(trial, Path(context_dir))
            self._until_prepared = stack.pop_all()

    def prepare(
        self,
        hparams: Mapping[str, Any],
        exp_conf: Mapping[str, Any] | None = None,
        micro_batch_size: int = 2,
        num_batches: int = 4,
        sample_batch: str | None = None,
        trusts_code: bool = False,
    ) -> None:
        """Make the trial; take its largest batch of ``num_batches``, or ``sample_batch``.

        ``micro_batch_size`` is what the context says meanwhile.
        """
        world_size = torch.distributed.get_world_size()
        self._context = _OwnContext(world_size, hparams, exp_conf, micro_batch_size)
        with self._until_prepared:
            self._trial = self._trial_class(self._context)
            if not self._calls:
                raise TrialContractError(
                    f"{self._trial_name} is built without deepspeed.initialize; expected at least one engine. "
                    "Call it in __init__."
                )
            if sample_batch is not None:
                self._batch = load(Path(sample_batch), trusts_code=trusts_code)
                self._num_records = self._trial.get_batch_length(self._batch)
            else:
                loader = self._trial.build_training_data_loader()
                self._batch, self._num_records = _largest_batch(
                    loader, self._trial.get_batch_length, num_batches
                )

    def _capture(self, call: CapturedInitialize) -> None:
        if self.num_stages == 1:
            call.refuse_pipeline("trial")
        call.stand_in.stand_for_trial(self._context.get_train_micro_batch_size_per_gpu())
        self._calls.append(call)

    def build(self, deepspeed_config: Mapping[str, Any], device: torch.device) -> Sequence[Any]:
        """Return the engines, built as the trial asked for them.

        A trial with one engine gets this config; one with several keeps its own, but for the batch sizes.
        """
        self._context.device = device
        engines = []
        for call in self._calls:
            config = deepspeed_config
            if len(self._calls) > 1:
                kept = {key: value for key, value in call.config.items() if key not in _BATCH_KEYS}
                config = {
                    **kept,
                    **{key: deepspeed_config[key] for key in _BATCH_KEYS if key in deepspeed_config},
                }
            engines.append(call.build(copy.deepcopy(dict(config))))
        self._pipelines = [engine for engine in engines if isinstance(engine, PipelineEngine)]
        for engine in self._pipelines:
            leave_out_shapes(engine, functools.partial(self._received, engine))
        return engines

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Call the trial's ``train_batch`` on a batch of that many records."""
        batch = tree_map_only(
            torch.Tensor, lambda tensor: self._resized(tensor, micro_batch_size), self._batch
        )
        drawn = itertools.repeat(batch)
        self._drawn = batch
        for engine in self._pipelines:
            engine.reset_activation_shape()
            engine.set_dataiterator(drawn)
        self._trial.train_batch(drawn, 0, 0)
        return batch

    def _received(self, engine: PipelineEngine) -> Any:
        """Return what the stage before sends, by the shapes of all earlier layers."""
        dtype = compute_dtype(engine)
        with _disable_current_modes(), torch.no_grad(), torch.device("meta"):
            sent = tree_map_only(
                torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), self._drawn[0]
            )
            for layer in earlier_layers(engine.module):
                if isinstance(layer, nn.Module):
                    layer.to(dtype)
                sent = layer(sent)
        return sent

    def _resized(self, tensor: torch.Tensor, num_records: int) -> torch.Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == self._num_records:
            shape[0] = num_records
        if self._is_fake:
            return torch.empty(shape, dtype=tensor.dtype)
        if list(tensor.shape) == shape:
            return tensor
        repeats = -(-num_records // len(tensor))
        return torch.cat([tensor] * repeats)[:num_records]


def _largest_batch(loader: Any, length: Callable[[Any], int], num_batches: int) -> tuple[Any, int]:
    """Return the largest of the first batches, by elements, and its records."""
    drawn = list(itertools.islice(iter(_as_loader(loader)), num_batches))
    if not drawn:
        raise TrialContractError(
            "build_training_data_loader returns an empty loader; expected at least one batch. Give it records."
        )
    largest = max(
        drawn,
        key=lambda batch: sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)),
    )
    return largest, length(largest)


def _as_loader(loader: Any) -> Any:
    """Return an iterable; Determined's ``DataLoader`` is a recipe for torch's."""
    if not isinstance(loader, pytorch.DataLoader):
        return loader
    own = copy.copy(loader)
    own.pin_memory = False  # which would make a CUDA context in a process that forks
    return own.get_data_loader(repeat=False, skip=0, num_replicas=1, rank=0)


class SingleRankContext(core.DummyDistributedContext):  # type: ignore[misc]  # determined ships no usable types for it
    """One of so many ranks, of which the others never answer."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__()
        self.size = self.local_size = size
        self.rank = self.local_rank = rank

    def allgather(self, stuff: Any) -> list[Any]:
        """Return what all ranks would say if they said the same."""
        return [stuff] * self.size

    gather = gather_local = allgather_local = allgather

    def broadcast(self, stuff: Any) -> Any:
        return stuff

    broadcast_local = broadcast

    def close(self) -> None:
        """Do nothing; there is no connection."""


class _OwnContext(DeepSpeedTrialContext):
    """A context off any cluster, which takes stand-ins for engines."""

    def __init__(
        self,
        world_size: int,
        hparams: Mapping[str, Any],
        exp_conf: Mapping[str, Any] | None,
        micro_batch_size: int,
    ) -> None:
        distributed = SingleRankContext(world_size, torch.distributed.get_rank())
        super().__init__(
            core_context=core._dummy_init(distributed=distributed),
            trial_seed=0,
            hparams=copy.deepcopy(dict(hparams)),
            slots_per_trial=world_size,
            num_gpus=0,
            exp_conf=None if exp_conf is None else dict(exp_conf),
            steps_completed=0,
            enable_tensorboard_logging=False,
            device=torch.device("cpu"),
        )
        self._described_micro_batch_size = micro_batch_size
        self._epoch_len, self._current_batch_idx = 1, 0
        self._mpu = ModelParallelUnit(0, world_size, True, True)

    def wrap_model_engine(self, model: Any) -> Any:
        self.models.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        self._mpu = mpu

    def get_train_micro_batch_size_per_gpu(self) -> int:
        return self._described_micro_batch_size

    def get_num_micro_batches_per_slot(self) -> int:
        return 1
