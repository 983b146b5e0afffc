"""Read, check, save and load an ``Accelerator`` that trains with DeepSpeed."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.diagnostics import render
from dstrial.engine.state import loading_with
from dstrial.errors import (
    CheckpointError,
    CheckpointLayoutError,
    ConfigError,
    ConfigProblem,
    DataError,
    RankError,
    TrialContractError,
)
from dstrial.ranks.identity import RankIdentity
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.trial import Checkpointable

logger = logging.getLogger("dstrial.integrations.accelerate")

_MICRO = BATCH_KEYS[1]
_RANDOM_STATES = "random_states_*.pkl"  # Accelerate's files, one for each process
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"  # Accelerate's variable; "true" switches DeepSpeed on


def require_deepspeed_on_all_ranks(
    accelerator: Any, identity: RankIdentity, environ: Mapping[str, str]
) -> None:
    """Raise unless the accelerator uses DeepSpeed and has the rank of ``identity``.

    Raises:
        RankError: the accelerator's rank or number of ranks differs from ``identity``.
        TrialContractError: the accelerator does not use DeepSpeed.
    """
    if accelerator.num_processes != identity.world_size:
        raise RankError(
            f"accelerator.num_processes is {accelerator.num_processes}; expected {identity.world_size}, the ranks that were "
            "launched: each would train alone on all the data. Start the script with `python -m dstrial.launch`, or on the "
            'CPU make it Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]).'
        )
    if accelerator.process_index != identity.rank:
        raise RankError(
            f"accelerator.process_index is {accelerator.process_index}; expected {identity.rank}, this process's rank. "
            "Make the accelerator in the process that the launcher started."
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "DEEPSPEED":
        return
    if environ.get(_USE_DEEPSPEED, "false").lower() == "true":
        raise TrialContractError(
            f"accelerator.distributed_type is {kind} although DeepSpeed is configured ({_USE_DEEPSPEED} is true); expected "
            "DEEPSPEED. Make the accelerator without cpu=True, and leave ACCELERATE_USE_CPU unset: both turn DeepSpeed off."
        )
    raise TrialContractError(
        f"accelerator.distributed_type is {kind}; expected DEEPSPEED. Give the experiment a "
        "hyperparameters.deepspeed_config and start the script with `python -m dstrial.launch`, or pass "
        "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...)); leave ACCELERATE_USE_CPU unset, with which "
        "Accelerate turns DeepSpeed off."
    )


def prepared_engines(accelerator: Any) -> list[DeepSpeedEngine]:
    """Return the accelerator's DeepSpeed engines, in the order of preparation.

    Raises:
        TrialContractError: no model is prepared, or a prepared model is not a DeepSpeed engine.
    """
    models = list(accelerator._models)
    if not models:
        raise TrialContractError(
            "the accelerator has prepared no model; expected accelerator.prepare(model, ...) before reporter.resume(). "
            "Call it first."
        )
    for model in models:
        if not isinstance(model, DeepSpeedEngine):
            raise TrialContractError(
                f"accelerator.prepare returned a {type(model).__name__}; expected a DeepSpeed engine, since DeepSpeed is "
                "configured. Prepare the model after the accelerator was made with DeepSpeed."
            )
    return models


def epoch_length_of(loader: Any, micro_batches_per_batch: int) -> int:
    """Return the number of batches (optimizer steps) per epoch, at least 1.

    An incomplete last batch counts, unless the loader has ``drop_last``.

    Raises:
        DataError: the loader has no length, or less than one batch.
    """
    try:
        length = len(loader)
    except TypeError:
        raise DataError(
            f"reporter.batches(loader): the loader is a {type(loader).__name__} without a length; expected one with a length, "
            "by which a resume finds its place. Give its data set a __len__, or draw from it yourself and call reporter.step."
        ) from None
    found = length // micro_batches_per_batch
    if not _drops_last(loader):
        found = -(-length // micro_batches_per_batch)
    if found < 1:
        raise DataError(
            f"reporter.batches(loader): the loader has {length} micro batches; expected a whole batch, "
            f"{micro_batches_per_batch} micro batches. Pass more records."
        )
    return found


def micro_batch_of(accelerator: Any, own: int | None) -> int:
    """Return the DeepSpeed config's micro batch size, else the script's size ``own``.

    Raises:
        ConfigError: the config's value is missing or "auto", and ``own`` is None.
    """
    size = accelerator.deepspeed_plugin.deepspeed_config.get(_MICRO)
    if isinstance(size, int):
        return size
    if own is None:
        fix = f"Set overwrite_deepspeed_args: {{{_MICRO}: 8}}, or call reporter.micro_batch_size(8)."
        raise ConfigError([ConfigProblem(f"deepspeed config: {_MICRO}", render(size), "a number", fix)])
    return own


def require_micro_batch(loaders: Iterable[Any], before: int | None, now: int) -> None:
    """Raise DataError if a resume changed the micro batch size, and no loader has it.

    ``before`` is the checkpoint's micro batch size (None for a new run), ``now`` that of the engine after the resume.
    ``loaders`` are all loaders that the accelerator has prepared. A no-op if no loader has a known batch size.
    """
    sizes = {size for loader in loaders if (size := _batch_size(loader)) is not None}
    if before is not None and before != now and sizes and now not in sizes:
        raise DataError(
            f"the loaders read micro batches of {', '.join(map(str, sorted(sizes)))} records; expected {now}, with which "
            "these ranks share the run's batch. Make the training loader with batch_size=reporter.micro_batch_size()."
        )


def warn_of_unrepeatable_order(loader: Any, *, is_chief: bool) -> None:
    """Warn on rank 0 if ``loader`` shuffles by a sampler that a resume cannot repeat."""
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import RandomSampler

    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if is_chief and isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        logger.warning(
            "the training records are shuffled in an order that a resume cannot repeat; pass "
            "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
        )


def _drops_last(loader: Any) -> bool:
    places = (loader, getattr(loader, "batch_sampler", None))
    return any(bool(getattr(place, name, False)) for place in places for name in ("drop_last", "_drop_last"))


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


class AcceleratorCheckpoint(Checkpointable):
    """Saves with ``Accelerator.save_state`` and loads with ``Accelerator.load_state``.

    Source: accelerate 1.15 saves the first engine under the tag ``pytorch_model``, engine *i* under ``pytorch_model_<i>``, and
        in separate files the samplers, registered objects, random states and schedulers that DeepSpeed does not own.
    """

    _saves_engines_by_tag = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def save(self, context: DeepSpeedTrialContext, path: pathlib.Path) -> None:  # noqa: ARG002  # the base's
        with _into_given_directory(self._accelerator):
            self._accelerator.save_state(str(path))

    def load(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        self._load_state(context, load_path, [_load_or_raise(engine, load_path) for engine in context.models])

    def _engine_tag(self, engine_idx: int) -> str:
        return "pytorch_model" if engine_idx == 0 else f"pytorch_model_{engine_idx}"

    def _load_beside_engines(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        self._load_state(context, load_path, [_load_nothing] * len(context.models))
        self._rescale_schedulers(len(list(load_path.glob(_RANDOM_STATES))))

    def _load_state(
        self, context: DeepSpeedTrialContext, load_path: pathlib.Path, loads: Sequence[Callable[..., Any]]
    ) -> None:
        """Call ``load_state`` while ``loads[i]`` replaces engine i's ``load_checkpoint``."""
        with contextlib.ExitStack() as stack:
            for engine, load in zip(context.models, loads, strict=True):
                stack.enter_context(loading_with(engine, load))
            self._accelerator.load_state(str(load_path))

    def _rescale_schedulers(self, num_saved: int) -> None:
        """Scale the schedulers' step counts and learning rates to the number of processes.

        Accelerate steps a scheduler once per process and batch. ``num_saved`` is the number of processes that wrote the
        checkpoint. A no-op if the number is unchanged or the accelerator splits batches.

        Raises:
            CheckpointLayoutError: a scheduler that Accelerate steps once per process is not a ``LambdaLR``.
        """
        now = int(self._accelerator.num_processes)
        if num_saved == now or self._accelerator.split_batches:
            return
        for scheduler in self._accelerator._schedulers:
            if not getattr(scheduler, "step_with_optimizer", False) or not hasattr(
                scheduler, "split_batches"
            ):
                continue
            inner = scheduler.scheduler
            if not isinstance(inner, torch.optim.lr_scheduler.LambdaLR):
                raise CheckpointLayoutError(
                    f"the {type(inner).__name__} is stepped once for each of {num_saved} processes and is now one of {now}; "
                    "expected a schedule that does not depend on their number. Make the accelerator with "
                    "step_scheduler_with_optimizer=False, and step the scheduler once per batch."
                )
            inner.last_epoch = inner.last_epoch * now // num_saved
            inner._step_count = inner.last_epoch + 1
            rates = [
                base * f(inner.last_epoch) for base, f in zip(inner.base_lrs, inner.lr_lambdas, strict=True)
            ]
            for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            inner._last_lr = rates


@contextlib.contextmanager
def _into_given_directory(accelerator: Any) -> Iterator[None]:
    """Make ``save_state(output_dir)`` write into ``output_dir`` in the ``with`` block.

    Source: accelerate 1.15 ignores ``output_dir`` if ``automatic_checkpoint_naming`` is set.
    """
    project = accelerator.project_configuration
    kept = project.automatic_checkpoint_naming, project.iteration
    project.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        project.automatic_checkpoint_naming, project.iteration = kept


def _load_or_raise(engine: DeepSpeedEngine, path: pathlib.Path) -> Callable[..., Any]:
    """Return a variant of ``engine.load_checkpoint`` that raises if it loads nothing.

    The variant raises CheckpointError; DeepSpeed's method only warns. ``path`` is the checkpoint's path for the error.
    """
    load = engine.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        loaded, client_state = load(*args, **kwargs)
        if loaded is None:
            raise CheckpointError(
                f"checkpoint {path} holds nothing that DeepSpeed can load; expected engine files. Resume from another "
                "checkpoint."
            )
        return loaded, client_state

    return load_checkpoint


def _load_nothing(*_args: Any, **_kwargs: Any) -> Any:
    """Do nothing: replaces ``engine.load_checkpoint`` to load only the other files."""
    return None, {}
