"""``DeepSpeedTrialContext``: a trial's config, engines, position and stop request."""

from __future__ import annotations

import copy
import logging
import math
import pathlib
import threading
import warnings
from typing import Any

import torch
from determined import core, pytorch, util

from dstrial import collector
from dstrial.config.batch import resolve_batch
from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.diagnostics import dotted
from dstrial.config.experiment_config.hyperparameters import searched_values
from dstrial.config.merge import overwrite_deepspeed_config
from dstrial.config.parallel_dims import ParallelDims, config_sizes, replicas_of
from dstrial.engine.adapters.base import EngineAdapter
from dstrial.engine.adapters.batch_sizes import dims_of
from dstrial.engine.adapters.factory import adapt, require_engine
from dstrial.engine.checkpoint_reader.safe_load import bind_checkpoint_engine, make_plain_config
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.engine.state import describe_optimizer, is_optimizer_setting
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.apply import ResumedRun
from dstrial.resume.metadata import SavedRun, given_settings
from dstrial.trial.determined_errors import InvalidTrialError, NoSeedError, NotTrainingError
from dstrial.trial.device_transfer import to_device
from dstrial.trial.runtime import ModelParallelUnit, TrialRuntime, make_data_parallel_mpu, make_deepspeed_mpu

logger = logging.getLogger("dstrial.trial")

_making_writer = threading.Lock()


class _RuntimeAttribute:
    """Descriptor that reads and writes the attribute ``name`` of ``TrialRuntime``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, context: DeepSpeedTrialContext, owner: type) -> Any:
        return getattr(context._runtime, self._name)

    def __set__(self, context: DeepSpeedTrialContext, value: Any) -> None:
        setattr(context._runtime, self._name, value)


class DeepSpeedTrialContext(pytorch._PyTorchReducerContext):  # type: ignore[misc]  # wrap_reducer lives there
    """The context of a ``DeepSpeedTrial``; create one with :func:`dstrial.init`.

    Attributes:
        distributed: Determined's distributed context: rank, size, gather, broadcast.
        device: the torch device of this rank, chosen through DeepSpeed's accelerator interface.
        models: the wrapped engines, in the order of wrapping.

    Source: the attributes of ``determined.pytorch.deepspeed.DeepSpeedTrialContext`` 0.38.1.
    """

    _core = _RuntimeAttribute("core")
    _exp_conf = _RuntimeAttribute("exp_conf")
    _hparams = _RuntimeAttribute("hparams")
    _trial_seed = _RuntimeAttribute("trial_seed")
    _steps_completed = _RuntimeAttribute("steps_completed")
    _mpu = _RuntimeAttribute("mpu")
    _current_batch_idx = _RuntimeAttribute("current_batch_idx")
    _epoch_len = _RuntimeAttribute("epoch_length")
    _manual_grad_accumulation = _RuntimeAttribute("accumulates_itself")
    _data_repro_checks_disabled = _RuntimeAttribute("repro_checks_disabled")
    _enable_tensorboard_logging = _RuntimeAttribute("writes_tensorboard")
    _stop_requested = _RuntimeAttribute("is_stop_requested")

    def __init__(
        self,
        core_context: core.Context,
        trial_seed: int | None,
        hparams: dict[str, Any] | None,
        slots_per_trial: int,
        num_gpus: int,
        exp_conf: dict[str, Any] | None,
        steps_completed: int,
        enable_tensorboard_logging: bool = True,
        device: torch.device | None = None,
        resumed: SavedRun | None = None,
    ) -> None:
        self.distributed = core_context.distributed
        super().__init__(self.distributed.allgather)
        given = copy.deepcopy(hparams)
        resumed_run: ResumedRun | None = None
        if resumed is not None and resumed.engines:
            resumed_run = ResumedRun(resumed, self.distributed.size, (exp_conf or {}).get("data") or {})
        own = given if resumed_run is None or given is None else resumed_run.hyperparameters(given)
        self.device = device if device is not None else _default_device()
        self.models: list[Any] = []
        self.profiler: Any = None
        self._runtime = TrialRuntime(
            core=core_context,
            engines=self.models,
            wrapped_reducers=self._wrapped_reducers,
            exp_conf=copy.deepcopy(exp_conf),
            given_hparams=given,
            hparams=own,
            trial_seed=trial_seed,
            steps_completed=steps_completed,
            resumed=resumed_run,
            mpu=make_data_parallel_mpu(self.distributed),
            writes_tensorboard=enable_tensorboard_logging,
        )
        self._num_gpus = num_gpus
        self._per_slot_batch_size: int | None = None
        self._global_batch_size: int | None = None
        if self._runtime.hparams and self._runtime.hparams.get("global_batch_size"):
            self._per_slot_batch_size, self._global_batch_size = util.calculate_batch_sizes(
                hparams=self._runtime.hparams, slots_per_trial=slots_per_trial, trialname="DeepSpeedTrial"
            )
        self._called_set_mpu = False
        self._use_pipeline_parallel = False
        self._to_device_warned_types: set[type] = set()

    # ---- metrics -------------------------------------------------------------------------------------

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the user's metric reducers, reduced over all ranks.

        ``for_training``: True selects the training reducers, False the validation reducers.

        Returns:
            Metric name -> result of the reducer's ``cross_slot_reduce``, equal on every rank; {} without reducers.

        Ranks: all, collectively.
        """
        reducers = [
            wrapped
            for wrapped in self._wrapped_reducers
            if (wrapped.for_training if for_training else wrapped.for_validation)
        ]
        if not reducers:
            return {}
        mine = [] if self._collects_copies else [[wrapped.per_slot_reduce() for wrapped in reducers]]
        gathered = [reductions for of_rank in self.distributed.allgather(mine) for reductions in of_rank]
        metrics: dict[str, Any] = self.run_cross_slot_reduction(reducers, gathered)
        return metrics

    @property
    def _collects_copies(self) -> bool:
        return not (
            self._runtime.mpu.should_report_metrics or self._use_pipeline_parallel or self._called_set_mpu
        )

    # ---- engines -------------------------------------------------------------------------------------

    def wrap_model_engine(self, model: Any) -> Any:
        """Register a DeepSpeed engine for training and checkpoints, and check its config.

        The first engine determines the batch sizes, and which ranks read records and report metrics. A resumed run keeps the
        checkpoint's ``train_batch_size``; micro batch size and accumulation steps are changed accordingly.

        Args:
            model: the engine, the first result of ``deepspeed.initialize``.

        Returns:
            The same engine. A pipeline engine's ``train_batch()`` and ``eval_batch()`` may be called without an
            iterator; they then use the trial's loader.

        Raises:
            ConfigError: the DeepSpeed config is invalid for the engine's parallel sizes, or a hyperparameter search varies a
                config section that an argument of ``deepspeed.initialize`` overrides.

        Ranks: all, with the engines in the same order.
        """
        require_engine(model)
        make_plain_config(model)
        bind_checkpoint_engine(model)
        given = self._fit_to_checkpoint(model)
        adapter = adapt(model)
        dims = dims_of(model)
        self._check_config(model, dims)
        self._check_overruled(model)
        self._use_pipeline_parallel = self._use_pipeline_parallel or dims.is_pipeline
        if not self.models:
            if dims.is_pipeline:
                self._runtime.mpu = make_deepspeed_mpu(adapter.topology)
            else:
                # Tensor-parallel ranks compute the same results, so only the first rank of each replica reports metrics.
                is_first = engines.checkpoint_part(model) == 0
                self._runtime.mpu = ModelParallelUnit(
                    adapter.data_parallel_rank, adapter.data_parallel_world_size, is_first, True
                )
        elif (
            adapter.micro_batch_size != self._runtime.adapters[0].micro_batch_size
            and self.distributed.rank == 0
        ):
            logger.warning(
                "engine %d has train_micro_batch_size_per_gpu %d and engine 0 has %d; samples per second count engine 0",
                len(self.models),
                adapter.micro_batch_size,
                self._runtime.adapters[0].micro_batch_size,
            )
        self.models.append(model)
        self._runtime.adapters.append(adapter)
        self._runtime.given_settings.append(given)
        return model

    def _fit_to_checkpoint(self, engine: Any) -> dict[str, Any]:
        """Return the user's settings in an engine's config, as in ``EngineRecord.given``.

        In a resumed run, also set the engine's batch sizes so that ``train_batch_size`` is that of the checkpoint.
        """
        if self._runtime.resumed is None:
            return given_settings(engines.config_of(engine))
        return self._runtime.resumed.fit_engine(engine, len(self.models), is_chief=self.distributed.rank == 0)

    def _check_config(self, engine: Any, dims: ParallelDims) -> None:
        # Accelerate 1.15 sets steps_per_print to infinity, which the check would reject.
        config = {key: value for key, value in engine.config.items() if value != math.inf}
        where = f"DeepSpeed config of engine {len(self.models)}"
        stage = int(engine.zero_optimization_stage())
        if stage < 3 and any(optimizers.is_cut(parameter) for parameter in engine.module.parameters()):
            problem = ConfigProblem(
                f"{where}: zero_optimization.stage",
                str(stage),
                "3, as deepspeed.zero.Init has cut the model's parameters over the ranks",
                "Set it to 3, or make the model in deepspeed.zero.Init(enabled=False).",
            )
            raise ConfigError([problem])
        steps = engine.gradient_accumulation_steps()
        if config.get("managed_gradient_accumulation") is False and steps > 1:
            problem = ConfigProblem(
                f"{where}: managed_gradient_accumulation",
                "false",
                f"true with gradient_accumulation_steps {steps}, as each call of step() would end a batch",
                "Remove it, or set gradient_accumulation_steps to 1.",
            )
            raise ConfigError([problem])
        result = check_deepspeed(config, dims, where=where)
        if result.problems:
            raise ConfigError(result.problems)
        if self.distributed.rank == 0:
            for warning in result.warnings:
                logger.warning("%s", warning)
            clipping = float(engine.gradient_clipping())
            if not self.models and config.get("gradient_clipping") is None and clipping:
                logger.info(
                    "gradient_clipping is %s, DeepSpeed's default (0.19.0 and 0.19.1 do not clip); set it in the DeepSpeed "
                    "config to change it",
                    clipping,
                )
            if not self.models and dims.sp > 1:
                is_averaged = engines.averages_sequence_gradients(engine)
                logger.info(
                    "sequence_parallel_size is %d: DeepSpeed %s the gradients of the ranks of a sequence; %s before "
                    "engine.backward (docs/how-to/parallelism.md)",
                    dims.sp,
                    "averages" if is_averaged else "adds",
                    "do not divide the loss" if is_averaged else f"divide the loss by {dims.sp}",
                )

    def _check_overruled(self, engine: Any) -> None:
        """Warn of config sections that ``deepspeed.initialize`` arguments override.

        Raises:
            ConfigError: a hyperparameter search varies an overridden section.
        """
        given = {"optimizer": engine.client_optimizer, "scheduler": engine.client_lr_scheduler}
        for section, client in given.items():
            if client is None or not engine.config.get(section):
                continue
            place = f"DeepSpeed config of engine {len(self.models)}: {section}"
            trained = (
                describe_optimizer(engine) if section == "optimizer" else type(engine.lr_scheduler).__name__
            )
            argument = "optimizer" if section == "optimizer" else "lr_scheduler"
            if self.distributed.rank == 0:
                logger.warning(
                    "%s is not used: the %s given to deepspeed.initialize overrides it, and this run trains with %s. "
                    "Remove the section from the config, or %s from the call",
                    *(place, argument, trained, argument),
                )
            if searched := self._searched_below(section, engine):
                problem = ConfigProblem(
                    place,
                    f"searched over ({', '.join(searched)}), but not used: this run trains with {trained}, the {argument} "
                    "given to deepspeed.initialize",
                    "a search over values that are trained with",
                    f"Leave {argument} out of the call, or search over a hyperparameter outside of the section, from which the "
                    f"code makes the {argument}.",
                )
                raise ConfigError([problem])

    def _searched_below(self, section: str, engine: Any) -> list[str]:
        specs = (self._runtime.exp_conf or {}).get("hyperparameters") or {}
        hparams = self._runtime.given_hparams or {}
        found = []
        for path, value in searched_values(specs, hparams):
            inside = len(path) > 1 and path[1] == section
            if inside and not (section == "optimizer" and is_optimizer_setting(engine, str(path[-1]), value)):
                found.append(f"{dotted(path)}: {value}")
        return found

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Set the rank layout for custom model parallelism; call it once.

        ``mpu`` says which data-parallel replica this rank belongs to, and whether the rank reads records and reports metrics.

        Raises:
            TrialContractError: no engine is wrapped yet, or ``set_mpu`` was called before.
        """
        if not self.models:
            raise InvalidTrialError(
                "set_mpu is called before an engine is wrapped; expected one. Call wrap_model_engine first."
            )
        if self._called_set_mpu:
            raise InvalidTrialError(
                "Only one MPU can be passed to DeepSpeedTrialContext. set_mpu is called a second time; expected once per "
                "trial. Remove one call."
            )
        self._called_set_mpu = True
        self._runtime.mpu = mpu
        self._runtime.adapters[0] = adapt(
            self.models[0],
            data_parallel_rank=mpu.data_parallel_rank,
            data_parallel_world_size=mpu.data_parallel_world_size,
        )

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether a wrapped engine is a pipeline engine."""
        return self._use_pipeline_parallel

    def disable_auto_grad_accumulation(self) -> None:
        """Let one call of ``train_batch`` train all micro batches of an optimizer step."""
        self._runtime.accumulates_itself = True

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders of any class; your loader must then shuffle and shard the data."""
        self._runtime.repro_checks_disabled = True

    def _first_adapter(self, asked: str) -> EngineAdapter:
        if not self._runtime.adapters:
            raise InvalidTrialError(
                f"{asked} is asked for before an engine is wrapped; expected one. Call wrap_model_engine first."
            )
        return self._runtime.adapters[0]

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the first engine's micro batch size: records in one forward pass."""
        return self._first_adapter("the micro batch size").micro_batch_size

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's data-parallel replica, from 0."""
        self._first_adapter("the data-parallel rank")
        return self._runtime.mpu.data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of data-parallel replicas, which read different records."""
        self._first_adapter("the number of replicas")
        return self._runtime.mpu.data_parallel_world_size

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the first engine's gradient accumulation steps: micro batches per step."""
        return self._first_adapter("the number of micro batches").micro_batches_per_batch

    @property
    def _train_micro_batch_size_per_gpu(self) -> int | None:
        return self._runtime.adapters[0].micro_batch_size if self._runtime.adapters else None

    @property
    def _num_micro_batches_per_slot(self) -> int | None:
        return self._runtime.adapters[0].micro_batches_per_batch if self._runtime.adapters else None

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Deprecated alias of ``get_train_micro_batch_size_per_gpu()``."""
        warnings.warn(
            "train_micro_batch_size_per_gpu is deprecated; use get_train_micro_batch_size_per_gpu()",
            FutureWarning,
            stacklevel=2,
        )
        return self.get_train_micro_batch_size_per_gpu()

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Deprecated alias of ``get_num_micro_batches_per_slot()``."""
        warnings.warn(
            "num_micro_batches_per_slot is deprecated; use get_num_micro_batches_per_slot()",
            FutureWarning,
            stacklevel=2,
        )
        return self.get_num_micro_batches_per_slot()

    # ---- data ----------------------------------------------------------------------------------------

    def to_device(self, data: Any) -> pytorch.TorchData:
        """Move tensors and arrays to this rank's device, in lists, tuples and dicts too.

        Tensors in pinned memory, such as those of ``dstrial.DataLoader``, are copied asynchronously: do not overwrite the
        pinned memory before the copy is complete. Objects without a ``to`` method are returned unchanged, with a warning.
        """
        return to_device(data, self.device, self._to_device_warned_types)

    # ---- position ------------------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        batch_idx = self.current_train_batch()
        if self._runtime.epoch_length is None:
            raise NotTrainingError(
                "the epoch is asked for, but the training loader has no length. Give it a __len__."
            )
        return batch_idx, self._runtime.epoch_length

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        batch_idx, epoch_len = self._position()
        return batch_idx % epoch_len == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        batch_idx, epoch_len = self._position()
        return batch_idx % epoch_len == epoch_len - 1

    def current_train_epoch(self) -> int:
        """Return the epoch number of the current batch, counted from 0 over the whole run."""
        batch_idx, epoch_len = self._position()
        return batch_idx // epoch_len

    def current_train_batch(self) -> int:
        """Return the current batch's number, counted from 0 over the whole run."""
        if self._runtime.current_batch_idx is None:
            raise NotTrainingError(
                "the position is asked for before training; expected during train_batch. Read it there."
            )
        return self._runtime.current_batch_idx

    def get_initial_batch(self) -> int:
        """Return the number of batches trained before this process; 0 in a new run."""
        return self._runtime.steps_completed

    # ---- configuration -------------------------------------------------------------------------------

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment config; ``ValueError`` if ``init`` was given none."""
        if self._runtime.exp_conf is None:
            raise ValueError("there is no experiment config; pass exp_conf to dstrial.init().")
        return self._runtime.exp_conf

    def get_data_config(self) -> dict[str, Any]:
        """Return a copy of the ``data`` section of the experiment config; {} if missing."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters; ``ValueError`` if ``init`` was given none."""
        if self._runtime.hparams is None:
            raise ValueError("there are no hyperparameters; pass hparams to dstrial.init().")
        return self._runtime.hparams

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter; ``ValueError`` if the name is unknown."""
        hparams = self.get_hparams()
        if name not in hparams:
            raise ValueError(
                f"hyperparameter {name!r} does not exist; expected one of {sorted(hparams)}. "
                "Add it to the hyperparameters of the experiment config."
            )
        return hparams[name]

    def get_deepspeed_config(
        self,
        name: str = "deepspeed_config",
        overwrite: str = "overwrite_deepspeed_args",
        *,
        model_parallel_size: int | None = None,
    ) -> dict[str, Any]:
        """Return a config for ``deepspeed.initialize``, with overwrites and batch sizes.

        Unlike ``overwrite_deepspeed_config``, this computes missing and ``"auto"`` batch sizes for the current number of
        replicas. A resumed run keeps the checkpoint's ``train_batch_size``.

        Args:
            name: name of the hyperparameter whose value is the config or the path of a JSON file.
            overwrite: name of the hyperparameter whose value overwrites parts of the config; need not exist.
            model_parallel_size: ranks per replica: pipeline stages times tensor-parallel size. By default computed from
                ``data.dstrial`` and from the config's tensor- and sequence-parallel sizes.

        Returns:
            A new dict.

        Raises:
            ConfigError: the batch sizes contradict each other or the number of replicas, the ranks cannot be divided into
                replicas of that size, or ``data.dstrial`` contradicts ``model_parallel_size``.
            ValueError: hyperparameter ``name`` does not exist.

        Not in Determined.
        """
        merged = overwrite_deepspeed_config(self.get_hparam(name), self.get_hparams().get(overwrite) or {})
        data_config = (self._runtime.exp_conf or {}).get("data") or {}
        engines = () if self._runtime.resumed is None else self._runtime.resumed.saved.engines
        otherwise = 1
        if engines:
            saved, num_ranks = engines[0], engines[0].world_size
            replica = saved.replica_with(data_config.get("dstrial"), merged)
            otherwise = num_ranks // saved.batch_replicas(num_ranks, replica)
        data_parallel_size = replicas_of(
            data_config, self.distributed.size, model_parallel_size, otherwise=otherwise, config=merged
        )
        kept = (
            None
            if self._runtime.resumed is None
            else self._runtime.resumed.resolve(merged, data_parallel_size)
        )
        resolved = resolve_batch(merged, data_parallel_size) if kept is None else kept
        if config_sizes(merged).get("model_parallel_size", 1) > 1:
            # With AutoTP under ZeRO 3, DeepSpeed checks train_batch_size twice: against all ranks, and against the replicas.
            resolved.pop("train_batch_size", None)
        return resolved

    def get_global_batch_size(self) -> int:
        """Return ``global_batch_size``, rounded down to a multiple of the number of ranks.

        ``global_batch_size`` is a hyperparameter that DeepSpeed ignores: the engines use ``train_batch_size`` of the DeepSpeed
        config.

        Raises:
            ValueError: the hyperparameter is not set.
        """
        if self._global_batch_size is None:
            raise ValueError(
                "the hyperparameter global_batch_size is not set; pass it in hparams to dstrial.init()."
            )
        return self._global_batch_size

    def get_per_slot_batch_size(self) -> int:
        """Return hyperparameter ``global_batch_size`` divided by the number of ranks.

        The result is rounded down. Raises ``ValueError`` if the hyperparameter is not set.
        """
        if self._per_slot_batch_size is None:
            raise ValueError(
                "the hyperparameter global_batch_size is not set; pass it in hparams to dstrial.init()."
            )
        return self._per_slot_batch_size

    def get_experiment_id(self) -> int:
        """Return the experiment's id on the master; 0 without a master."""
        return int(self._runtime.core.train._exp_id)  # Determined has no public name for it

    def get_trial_id(self) -> int:
        """Return the trial's id on the master; 0 without a master."""
        return int(self._runtime.core.train._trial_id)

    def get_trial_seed(self) -> int:
        """Return the trial's seed; ``NoSeedError`` if none is configured."""
        if self._runtime.trial_seed is None:
            raise NoSeedError(
                "there is no trial seed; set reproducibility.experiment_seed in the experiment config."
            )
        return self._runtime.trial_seed

    # ---- TensorBoard, profiling ----------------------------------------------------------------------

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory for TensorBoard event files."""
        return pathlib.Path(self._runtime.core.train.get_tensorboard_path())

    def get_tensorboard_writer(self) -> Any:
        """Return this rank's ``SummaryWriter``; the first call creates it."""
        with _making_writer:  # user code and the report writer may call this from different threads
            if self._runtime.tensorboard_writer is None:
                # TensorBoard imports boto3, fsspec and protobuf, which takes half of the time of the first report.
                with collector.paused():
                    from torch.utils.tensorboard import SummaryWriter

                self._runtime.tensorboard_writer = SummaryWriter(self.get_tensorboard_path())
            return self._runtime.tensorboard_writer

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Enable or disable writing reported metrics to TensorBoard."""
        if not isinstance(enable_tensorboard_logging, bool):
            raise AssertionError("enable_tensorboard_logging must be a boolean")
        self._runtime.writes_tensorboard = enable_tensorboard_logging

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether reported metrics are written to TensorBoard."""
        return self._runtime.writes_tensorboard

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile the training with ``torch.profiler.profile(*args, **kwargs)``.

        The training loop calls the profiler's ``step`` after every batch. Traces are written to the TensorBoard directory.
        """
        handler = torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))
        self.profiler = torch.profiler.profile(*args, on_trace_ready=handler, **kwargs)

    # ---- stopping ------------------------------------------------------------------------------------

    def get_stop_requested(self) -> bool:
        """Return whether this rank has requested a stop of the training."""
        return self._runtime.is_stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request a stop of the training (True), or withdraw the request (False).

        If any rank has requested a stop, all ranks save a checkpoint and stop.
        """
        if not isinstance(stop_requested, bool):
            raise AssertionError("stop_requested must be a boolean")
        if stop_requested:
            logger.info("a stop is requested; training stops at the next point at which all ranks agree")
        self._runtime.is_stop_requested = stop_requested


def runtime_of(context: DeepSpeedTrialContext) -> TrialRuntime:
    """Return a context's internal state; not for user code."""
    return context._runtime


def _default_device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
