"""Workloads of dry runs: a DeepSpeedTrial, or a script's model and first batch.

A dry run executes the code of the trial or script, which reads its data. The parameters are fake tensors, which have only
shapes, and are trained on a batch of the right shape. If the code reads values of tensors, the dry run reports the line.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import determined as det
import torch
from deepspeed import PipelineEngine
from determined import core, pytorch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dstrial import runtime
from dstrial.dsat.rank.standalone_script import run_script, stand_in_cluster
from dstrial.engine.checkpoint_reader.safe_load import load
from dstrial.engine.deepspeed_internals.engines import (
    compute_dtype,
    earlier_layers,
    leave_out_shapes,
    replace_forward,
)
from dstrial.engine.dryrun.fake_world import FakeWorld
from dstrial.errors import TrialContractError
from dstrial.launch.trial_import import import_trial
from dstrial.local.run_directory import RUN_DIR_VARIABLE
from dstrial.ranks.accelerate_backend import show_ranks_to_accelerate
from dstrial.ranks.identity import LOOPBACK_ADDR
from dstrial.scratch import scratch_directory
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.runtime import ModelParallelUnit


class TrialWorkload:
    """A DeepSpeedTrial as a workload of a dry run.

    The class implements the protocol ``engine.dryrun.measure.Workload``.

    The batch is the largest of the loader's first ``num_batches``, or that in the file ``sample_batch``; ``trusts_code`` loads
    the file even if it holds other classes than tensors. ``num_stages`` is the number of pipeline stages.
    """

    def __init__(
        self,
        world: FakeWorld,
        *,
        trial: str,
        context_dir: str,
        hparams: Mapping[str, Any],
        exp_conf: Mapping[str, Any] | None = None,
        num_batches: int = 4,
        sample_batch: str | None = None,
        trusts_code: bool = False,
        num_stages: int = 1,
    ) -> None:
        self.engines: list[Any] = []
        self.epoch_records = 0
        self._is_fake = world.is_fake
        with world.building(
            self._add_engine, pipeline_refusal=_refusal("trial") if num_stages == 1 else None
        ):
            trial_class = import_trial(trial, Path(context_dir))
            world_size = torch.distributed.get_world_size()
            self._trial = trial_class(_DryRunContext(world_size, hparams, exp_conf, world.micro_batch_size))
            if not self.engines:
                raise TrialContractError(
                    f"{trial} is built without deepspeed.initialize; expected at least one engine. "
                    "Call it in __init__."
                )
            if sample_batch is not None:
                self._batch = load(Path(sample_batch), trusts_code=trusts_code)
            else:
                loader = self._trial.build_training_data_loader()
                self._batch = _largest_batch(loader, num_batches)
                self.epoch_records = _num_records(loader)
            self._num_records = self._trial.get_batch_length(self._batch)

    def _add_engine(self, engine: Any) -> None:
        self.engines.append(engine)
        if isinstance(engine, PipelineEngine):
            leave_out_shapes(engine, functools.partial(self._received, engine))

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Call the trial's ``train_batch`` with a batch of this size; return the batch."""
        self._current = _resized(self._batch, self._num_records, micro_batch_size, is_fake=self._is_fake)
        batches = itertools.repeat(self._current)
        for engine in self.engines:
            if isinstance(engine, PipelineEngine):
                engine.reset_activation_shape()
                engine.set_dataiterator(batches)
        self._trial.train_batch(batches, 0, 0)
        return self._current

    def _received(self, engine: PipelineEngine) -> Any:
        """Return a pipeline stage's input, computed by earlier layers on meta tensors."""
        dtype = compute_dtype(engine)
        with _disable_current_modes(), torch.no_grad(), torch.device("meta"):
            sent = tree_map_only(
                torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), self._current[0]
            )
            for layer in earlier_layers(engine.module):
                if isinstance(layer, nn.Module):
                    layer.to(dtype)
                sent = layer(sent)
        return sent


class ScriptWorkload:
    """A script's model and first batch as a workload of a dry run.

    The class implements the protocol ``engine.dryrun.measure.Workload``.

    The script runs until it calls the engine. The loss is the output's ``loss``, else the first tensor in it with a single
    number, else the mean of the output. ``sample_batch`` is the file of a batch to use instead; ``trusts_code`` loads it even
    if it holds other classes than tensors.
    """

    def __init__(
        self,
        world: FakeWorld,
        *,
        words: Sequence[str],
        hparams: Mapping[str, Any],
        exp_conf: Mapping[str, Any] | None = None,
        sample_batch: str | None = None,
        trusts_code: bool = False,
    ) -> None:
        self.engines: list[Any] = []
        self.notes: list[str] = []
        self._is_fake = world.is_fake
        size = torch.distributed.get_world_size()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_core_api_off_cluster(size, hparams, exp_conf or {}))
            stack.enter_context(world.building(self._add_engine, pipeline_refusal=_refusal("script")))
            batch = _first_batch(words)
        if batch is None:
            raise TrialContractError(
                f"{' '.join(words[:2])} ends without a batch for an engine of deepspeed.initialize; expected one. "
                "Call the engine."
            )
        replace_forward(self.engines[0], None)
        if sample_batch is not None:
            batch = _arguments(load(Path(sample_batch), trusts_code=trusts_code))
        self._batch = batch
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
        self.num_records = len(next(tensors, ()))

    def _add_engine(self, engine: Any) -> None:
        replace_forward(engine, _end_script)
        self.engines = [engine]

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Train on the script's first batch, resized to this size; return the batch."""
        (engine,) = self.engines
        args, kwargs = batch = _resized(
            self._batch, self.num_records, micro_batch_size, is_fake=self._is_fake
        )
        engine.backward(self._loss(engine(*args, **kwargs)))
        engine.step()
        return batch

    def _loss(self, output: Any) -> torch.Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if loss is None:
            loss = next((leaf for leaf in leaves if leaf.numel() == 1 and leaf.requires_grad), None)
        if isinstance(loss, torch.Tensor):
            return loss
        note = "the script's loss is not part of its model, so the mean of the model's output took its place"
        if note not in self.notes:
            self.notes.append(note)
        return torch.stack([leaf.float().mean() for leaf in leaves if leaf.requires_grad]).sum()


def _resized(batch: Any, num_records: int, wanted: int, *, is_fake: bool) -> Any:
    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == num_records:
            shape[0] = wanted
        if is_fake:
            return torch.empty(shape, dtype=tensor.dtype)
        if list(tensor.shape) == shape:
            return tensor
        return torch.cat([tensor] * -(-wanted // len(tensor)))[:wanted]

    return tree_map_only(torch.Tensor, resized, batch)


def _num_records(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return 0


def _largest_batch(loader: Any, num_batches: int) -> Any:
    if isinstance(loader, pytorch.DataLoader):  # Determined's description of a torch loader
        loader = copy.copy(loader)
        loader.pin_memory = False  # would make a CUDA context in a process that forks
        loader = loader.get_data_loader(repeat=False, skip=0, num_replicas=1, rank=0)
    batches = list(itertools.islice(iter(loader), num_batches))
    if not batches:
        raise TrialContractError(
            "build_training_data_loader returns an empty loader; expected at least one batch. Give it records."
        )
    return max(
        batches,
        key=lambda batch: sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)),
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class _Captured(BaseException):
    """Ends the script at its first engine call; not caught by ``except Exception``."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.batch = args, kwargs


def _end_script(*args: Any, **kwargs: Any) -> Any:
    raise _Captured(args, kwargs)


def _first_batch(words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Run the script until it calls the engine; return (args, kwargs) of the call.

    None if the script ends without a call.
    """
    show_ranks_to_accelerate()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", []))
        stack.enter_context(mock.patch.object(sys, "path", ["", *sys.path]))
        # The script works in a directory of links to its real files, so that it leaves no new files there.
        context_dir = Path.cwd()
        linked = stack.enter_context(scratch_directory("dstrial-described-"))
        for path in context_dir.iterdir():
            (linked / path.name).symlink_to(path)
        stack.enter_context(contextlib.chdir(linked))
        try:
            run_script(words, context_dir)
        except _Captured as captured:
            return captured.batch
    return None


def _refusal(whose: str) -> str:
    return (
        f"the {whose} trains a pipeline; expected a model in one piece. Measure pipelines with method asha."
    )


@contextlib.contextmanager
def _core_api_off_cluster(
    size: int, hparams: Mapping[str, Any], exp_conf: Mapping[str, Any]
) -> Iterator[None]:
    """Make Determined's Core API behave as in rank 0 of a trial while the block runs."""
    distributed = SingleRankContext(size)
    info = stand_in_cluster(
        hparams, exp_conf, cluster_id="dry run", num_slots=size, num_ranks=size, address=LOOPBACK_ADDR
    )
    returned: list[tuple[Any, str, object]] = [
        (det, "get_cluster_info", info),
        (core, "init", core._dummy_init(distributed=distributed)),
        (runtime, "ControlChannel", distributed),
    ]
    for name in ("from_deepspeed", "from_torch_distributed", "from_horovod"):
        returned.append((core.DistributedContext, name, distributed))
    with contextlib.ExitStack() as stack:
        for owner, name, value in returned:
            stack.enter_context(mock.patch.object(owner, name, return_value=value))
        stack.enter_context(mock.patch.object(det._info, "_info", info))
        # ``dstrial run`` sets a run directory, which would be opened and written to.
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop(RUN_DIR_VARIABLE, None)
        yield


class SingleRankContext(core.DummyDistributedContext):  # type: ignore[misc]  # determined ships no usable types for it
    """Determined's distributed context on one of ``size`` ranks; sends nothing.

    Its collectives return what they would if all ranks passed the same value.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__()
        self.size = self.local_size = size
        self.rank = self.local_rank = rank

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff] * self.size

    gather = gather_local = allgather_local = allgather

    def broadcast(self, stuff: Any) -> Any:
        return stuff

    broadcast_local = broadcast

    def close(self) -> None:
        """Do nothing; there is no connection."""


class _DryRunContext(DeepSpeedTrialContext):
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
