"""Dry-run a script's model and first batch, by running it up to that batch."""

from __future__ import annotations

import contextlib
import copy
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import determined as det
import torch
from determined import core
from torch.utils._pytree import tree_leaves, tree_map_only

from dstrial import runtime
from dstrial.dsat.rank.standalone_script import stand_in_cluster
from dstrial.dsat.rank.trace_trial import SingleRankContext
from dstrial.engine.checkpoint_reader.safe_load import load
from dstrial.engine.dryrun.fake_world import CapturedInitialize, FakeWorld
from dstrial.errors import TrialContractError
from dstrial.local.run_directory import RUN_DIR_VARIABLE
from dstrial.ranks.accelerate_backend import show_ranks_to_accelerate
from dstrial.ranks.identity import LOOPBACK_ADDR
from dstrial.scratch import scratch_directory

_AUTO = "auto"
_NO_CLUSTER = "dry run"


class ScriptWorkload:
    """A script's model and first batch as an ``engine.dryrun.measure.Workload``.

    What the script does with the engine's output is not run: the loss is the output itself where that is one number, its
    ``loss``, or the mean of all numbers of the output.
    """

    def __init__(self, world: FakeWorld) -> None:
        self.notes: list[str] = []
        self._world = world
        self._call: CapturedInitialize | None = None
        self._engine: Any = None
        self._device = torch.device("cpu")

    def prepare(
        self,
        words: Sequence[str],
        hparams: Mapping[str, Any],
        exp_conf: Mapping[str, Any] | None = None,
        sample_batch: str | None = None,
        trusts_code: bool = False,
    ) -> None:
        """Run the script, imports included, until it calls an engine."""
        size = torch.distributed.get_world_size()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_off_cluster(size, hparams, exp_conf or {}))
            stack.enter_context(self._world.before_engines(self._capture))
            batch = _first_batch(words)
        if batch is None:
            raise TrialContractError(
                f"{' '.join(words[:2])} ends without a batch for an engine of deepspeed.initialize; expected one. "
                "Call the engine."
            )
        if sample_batch is not None:
            batch = _arguments(load(Path(sample_batch), trusts_code=trusts_code))
        self._args, self._kwargs = batch
        first = next(
            (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None
        )
        self.num_records = 0 if first is None else len(first)

    def _capture(self, call: CapturedInitialize) -> None:
        call.refuse_pipeline("script")
        call.stand_in.stand_for_script(_end_script)
        self._call = call

    def build(self, deepspeed_config: Mapping[str, Any], device: torch.device) -> Sequence[Any]:
        """Return the script's engine with a config; its own values fill ``"auto"``."""
        self._device = device
        assert self._call is not None  # there is no batch without it
        self._engine = self._call.build(_filled(deepspeed_config, self._call.config))
        return [self._engine]

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Train on the script's first batch, resized."""
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: self._resized(tensor, micro_batch_size), (self._args, self._kwargs)
        )
        output = self._engine(*args, **kwargs)
        self._engine.backward(self._loss(output))
        self._engine.step()
        return args, kwargs

    def _resized(self, tensor: torch.Tensor, num_records: int) -> torch.Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == self.num_records:
            shape[0] = num_records
        if self._world.is_fake:
            return torch.empty(shape, dtype=tensor.dtype, device=self._device)
        repeats = -(-shape[0] // max(len(tensor), 1)) if shape else 1
        return torch.cat([tensor] * repeats)[: shape[0]] if repeats > 1 or shape else tensor

    def _loss(self, output: Any) -> torch.Tensor:
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if found is None:
            found = next((leaf for leaf in leaves if leaf.numel() == 1 and leaf.requires_grad), None)
        if isinstance(found, torch.Tensor):
            return found
        note = "the script's loss is not part of its model, so the mean of the model's output took its place"
        if note not in self.notes:
            self.notes.append(note)
        return torch.stack([leaf.float().mean() for leaf in leaves if leaf.requires_grad]).sum()


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of an engine."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class _Captured(BaseException):
    """Ends the script at its first batch; its ``except Exception`` cannot stop this."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.batch = args, kwargs


def _end_script(*args: Any, **kwargs: Any) -> Any:
    raise _Captured(args, kwargs)


def _filled(config: Mapping[str, Any], captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with ``"auto"`` values of ``captured``, or without them."""
    filled: dict[str, Any] = {}
    for key, value in config.items():
        known = captured.get(key)
        if isinstance(value, Mapping):
            filled[key] = _filled(value, known if isinstance(known, Mapping) else {})
        elif value != _AUTO:
            filled[key] = copy.deepcopy(value)
        elif known is not None and known != _AUTO:
            filled[key] = copy.deepcopy(known)
    return filled


def _first_batch(words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Run a script, or ``-m MODULE``, to its first engine call; return its arguments."""
    is_module = words[0] == "-m"
    directory = Path.cwd() if is_module else Path(words[0]).resolve().parent
    argv = list(words[1:] if is_module else words)
    show_ranks_to_accelerate()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(sys, "path", [str(directory), *sys.path]))
        stack.enter_context(_stand_in_directory())
        try:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except _Captured as captured:
            return captured.batch
    return None


@contextlib.contextmanager
def _stand_in_directory() -> Iterator[None]:
    """Work in a directory of links to this one, so that the script leaves no files."""
    real = Path.cwd()
    with scratch_directory("dstrial-described-") as made:
        for path in real.iterdir():
            (made / path.name).symlink_to(path)
        os.chdir(made)
        try:
            yield
        finally:
            os.chdir(real)


@contextlib.contextmanager
def _off_cluster(size: int, hparams: Mapping[str, Any], exp_conf: Mapping[str, Any]) -> Iterator[None]:
    """Let the Core APIs answer the script as rank 0 of a trial without a master."""
    distributed = SingleRankContext(size)
    info = stand_in_cluster(
        hparams, exp_conf, cluster_id=_NO_CLUSTER, num_slots=size, num_ranks=size, address=LOOPBACK_ADDR
    )

    def told() -> Any:
        return info

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return core._dummy_init(distributed=distributed)

    def alone(*_args: Any, **_kwargs: Any) -> Any:
        return distributed

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(det, "get_cluster_info", told))
        stack.enter_context(mock.patch.object(det._info, "_info", info))
        stack.enter_context(mock.patch.object(core, "init", answer))
        stack.enter_context(mock.patch.object(runtime, "ControlChannel", alone))
        # Under ``dstrial run`` the run directory would be opened and written into.
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop(RUN_DIR_VARIABLE, None)
        for name in ("from_deepspeed", "from_torch_distributed", "from_horovod"):
            stack.enter_context(mock.patch.object(core.DistributedContext, name, alone))
        yield
