"""``init()`` makes a context, ``Trainer.fit()`` trains, ``run_trial()`` does both."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from determined import core, pytorch

from dstrial.config.dotted_keys import dstrial_section, wants_system_metrics
from dstrial.config.experiment_config.config import ExperimentConfig
from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.config.schema import Length
from dstrial.engine.deepspeed_internals import engines
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.local.run_directory import REWRITE_VARIABLE, RUN_DIR_VARIABLE, TEST_VARIABLE, RunState
from dstrial.local.script_variables import AROUND_FIT_KEY, measuring_hyperparameters
from dstrial.loggers.run_loggers import RunLoggers, loggers_of
from dstrial.loop.boundaries import FitResult, LoopSettings, searcher_length, train_unit
from dstrial.loop.loop import TrainingLoop, exits_refused, require_engine
from dstrial.loop.metric_sinks import LiveProgress, MetricSink
from dstrial.loop.sync_point import StopReason
from dstrial.ranks.identity import identify
from dstrial.ranks.startup_phase import begin_phase, end_phases
from dstrial.resume.locate import resumed_run, trial_id_of
from dstrial.resume.metadata import RESUME_VARIABLE
from dstrial.runtime import ProcessRuntime, cluster_info, process_runtime
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.runtime import TrialRuntime
from dstrial.trial.trial import DeepSpeedTrial

logger = logging.getLogger("dstrial.trainer")

_TEST_BATCHES = 2  # length of the training of `dstrial run --test`

_REPORTING_PERIOD = pytorch.Batch(100)
"""Default period of training reports. If ``max_length`` is in epochs, each epoch's end is reported too."""


@contextlib.contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
    latest_checkpoint: str | None = None,
) -> Iterator[DeepSpeedTrialContext]:
    """Yield a trial's context; in the block, build the trial and call ``Trainer.fit``.

    Sets up the process group from the environment: one rank under ``python`` or a notebook, many under ``dstrial.launch``,
    ``torchrun``, ``deepspeed``, ``srun``, ``mpirun`` and Determined's launchers. Random states are seeded with the trial's seed;
    without a master (of Determined or dstrial), with ``reproducibility.experiment_seed`` of ``exp_conf``, if given.

    Args:
        hparams: hyperparameters; under a master, the default is the trial's hyperparameters.
        exp_conf: the experiment config; used only without a master.
        distributed: your own distributed context; you must then set up the process group.
        enable_tensorboard_logging: whether reported metrics are written for TensorBoard.
        run_dir: the run directory to create, or that of an earlier run to continue; used only without a master. The default
            is a new directory under ``./runs``.
        latest_checkpoint: the checkpoint that you will pass to ``Trainer.fit``, if any. The context then keeps the
            checkpoint's ``train_batch_size`` on any number of ranks, and changes the other batch sizes.

    Raises:
        ConfigError: the hyperparameters give another batch size than the checkpoint's, or the batch cannot be divided among
            the ranks.
        RankIdentityError: environment variables contradict each other about this process's rank, or a trial with
            several slots was started without a launcher.

    Ranks: all, collectively.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(end_phases)
        begin_phase("connecting the ranks")
        found = stack.enter_context(
            # Until the first batch, stop signals end the process: nothing is to be saved, and a rank may compile for minutes.
            process_runtime(exp_conf=exp_conf, run_dir=run_dir, distributed=distributed, defers_signals=True)
        )
        info = found.info
        seed = _trial_seed(found)
        if seed is not None:
            seed_everything(seed)
        context = DeepSpeedTrialContext(
            core_context=found.core_context,
            trial_seed=seed,
            hparams=_hyperparameters(info, hparams),
            slots_per_trial=found.distributed.size,
            num_gpus=found.distributed.size if found.device.type != "cpu" else 0,
            exp_conf=found.exp_conf,
            steps_completed=0 if info is None else info.trial._steps_completed,
            enable_tensorboard_logging=enable_tensorboard_logging,
            device=found.device,
            resumed=resumed_run(found.core_context, info, latest_checkpoint, is_mirrored=found.is_mirrored),
        )
        runtime = runtime_of(context)
        runtime.stop_signals = found.signals
        runtime.own_run, runtime.is_own_run = found.own_run, found.is_own_run
        stack.callback(runtime.close_tensorboard_writer)
        begin_phase("building the trial and its engines")
        with _explained_errors(context, runtime):
            yield context


def _trial_seed(found: ProcessRuntime) -> int | None:
    if found.info is not None:
        return int(found.info.trial.trial_seed)
    seed = ((found.exp_conf or {}).get("reproducibility") or {}).get("experiment_seed")
    return None if seed is None else int(seed)


def _hyperparameters(info: Any, given: dict[str, Any] | None) -> dict[str, Any] | None:
    if info is not None and given is None:
        return cast("dict[str, Any]", info.trial.hparams)
    measuring = measuring_hyperparameters() if info is None else None
    return given if measuring is None else {**(given or {}), **measuring}


@contextlib.contextmanager
def _explained_errors(context: DeepSpeedTrialContext, runtime: TrialRuntime) -> Iterator[None]:
    """Add hints to errors that DeepSpeed raises in the block.

    In a resumed run, DeepSpeed's AssertionError about batch sizes is replaced by a ConfigError, which names the checkpoint's
    batch size.
    """
    try:
        yield
    except AssertionError as error:
        kept = runtime.resumed
        explained = None if kept is None else kept.explain(error, len(context.models))
        if explained is None:
            engines.append_remedy(error)
            raise
        raise explained from error
    except (RuntimeError, KeyError, TypeError) as error:
        engines.append_remedy(error)
        raise


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Trainer:
    """Trains a ``DeepSpeedTrial``; use it inside ``with dstrial.init(...)``.

    Args:
        trial: the trial, built with ``context``.
        context: the context that ``init`` yielded.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        self._trial = trial
        self._context = context
        self._runtime = runtime_of(context)
        self._info = cluster_info()

    def fit(
        self,
        checkpoint_period: pytorch.TrainUnit | None = None,
        validation_period: pytorch.TrainUnit | None = None,
        max_length: pytorch.TrainUnit | None = None,
        reporting_period: pytorch.TrainUnit | None = _REPORTING_PERIOD,
        checkpoint_policy: str = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        metric_sinks: Sequence[MetricSink] = (),
    ) -> FitResult:
        """Train to ``max_length``; report, validate and checkpoint periodically.

        Periods are counted from the start of the run, also after a resume. ``Batch(100)`` means every 100 batches,
        ``Batch([5, 30])`` only after batches 5 and 30. Complete training ends with a validation and a checkpoint. If training
        stops early, it ends with a checkpoint only.

        Args:
            checkpoint_period: how often to checkpoint, besides the checkpoints of ``checkpoint_policy``; None for no period.
            validation_period: how often to validate; None means only at the end.
            max_length: how long to train, ``Batch(int)`` or ``Epoch(int)``. Under a master (of Determined or dstrial), the
                default is ``searcher.max_length`` or ``max_time`` of the experiment config.
            reporting_period: how often to report training metrics, each time with one call of ``on_training_workload_end``.
                By default, or if None: every 100 batches and, if ``max_length`` is in epochs, at the end of each epoch.
            checkpoint_policy: which validations are followed by a checkpoint: ``all``, ``none``, or ``best``: those that
                improve ``searcher.metric`` over all earlier validations of the experiment (without a master: of this run).
            latest_checkpoint: uuid of the checkpoint to continue from; without a master, also its directory or ``latest``.
                Without a master, a uuid is searched for in this run, in runs beside this run, and in the default directory of
                runs.
            step_zero_validation: whether to validate before the first batch of a new run.
            test_mode: train and validate one batch each; not allowed under a master.
            profiling_enabled: whether to collect system metrics of each node until the core context ends; ignored in test mode.
            metric_sinks: objects that also receive the reported metrics; ``fit`` opens and closes them. Not in Determined.

        Returns:
            The number of batches trained, the reason if training stopped early, the newest checkpoint and metrics.

        Raises:
            ValueError: ``max_length`` is missing, or an argument has an invalid value.
            TypeError: a length or period has the wrong type.
            DstrialError: user code, the data or a checkpoint is invalid.

        Ranks: all, collectively.
        """
        runtime = self._runtime
        if checkpoint_policy not in ("best", "all", "none"):
            raise ValueError(
                f"checkpoint_policy is {checkpoint_policy!r}; expected 'best', 'all' or 'none'. Choose one of them."
            )
        if self._info is not None and test_mode:
            raise ValueError("test_mode is True on a cluster; expected False. Use it off a cluster only.")
        require_engine(self._trial, self._context)
        searcher = dict((runtime.exp_conf or {}).get("searcher") or {})
        metric: str | None = searcher.get("metric")
        latest_checkpoint = self._checkpoint_to_load(latest_checkpoint)
        length = pytorch.Batch(1) if test_mode else self._length_of(max_length, searcher)
        if checkpoint_policy == "best" and metric is None:
            if runtime.is_chief:
                logger.warning(
                    "checkpoint_policy is 'best' without a searcher.metric to compare; using 'all'"
                )
            checkpoint_policy = "all"
        settings = LoopSettings(
            max_length=length,
            reporting_period=_REPORTING_PERIOD if reporting_period is None else reporting_period,
            validation_period=validation_period,
            checkpoint_period=checkpoint_period,
            checkpoint_policy=cast(Literal["best", "all", "none"], checkpoint_policy),
            searcher_metric=metric,
            smaller_is_better=bool(searcher.get("smaller_is_better", True)),
            latest_checkpoint=latest_checkpoint,
            step_zero_validation=step_zero_validation,
            data_seed=runtime.trial_seed or 0,
            trial_id=trial_id_of(self._info, is_mirrored=runtime.is_mirrored),
            max_validation_rounds=1 if test_mode else None,
            is_rewrite=bool(os.environ.get(REWRITE_VARIABLE)),
            saves_in_background=_is_switched_on(runtime.exp_conf, "background_saving"),
            checks=TrainingChecks.from_config(runtime.exp_conf),
            reports_epochs=(reporting_period is None or reporting_period is _REPORTING_PERIOD)
            and isinstance(length, pytorch.Epoch),
            has_telemetry=_is_switched_on(runtime.exp_conf, "telemetry"),
        )
        if profiling_enabled and not test_mode and not runtime.is_measured:
            runtime.core.profiler.on()
        with _around_fit(runtime), loggers_of(self._context, is_test=test_mode) as loggers:
            return self._run(settings, metric_sinks, loggers)

    def _length_of(self, asked: pytorch.TrainUnit | None, searcher: Mapping[str, Any]) -> pytorch.TrainUnit:
        length = asked
        if self._info is not None:
            length = searcher_length(searcher, self._runtime.train_batch_size) if asked is None else asked
            _warn_of_another_length(searcher, length)
        if length is None:
            raise ValueError("max_length is None; expected Batch(n) or Epoch(n). Pass fit(max_length=...).")
        return length

    def _run(
        self, settings: LoopSettings, metric_sinks: Sequence[MetricSink], loggers: RunLoggers
    ) -> FitResult:
        begin_phase(
            "building data loaders" if settings.latest_checkpoint is None else "loading the checkpoint"
        )
        runtime, length = self._runtime, settings.max_length
        # Print reports only if this script made the run; otherwise the launcher or `dstrial run` prints them.
        live = LiveProgress(
            length.value if isinstance(length, pytorch.Batch) and isinstance(length.value, int) else None,
            settings.searcher_metric,
            is_silent=runtime.own_run is None,
        )
        loop = TrainingLoop(
            self._trial,
            self._context,
            settings,
            stop_request=self._stop_request,
            metric_sinks=[*loggers.sinks, live, *metric_sinks],
        )
        run_path = os.environ.get(RUN_DIR_VARIABLE) if runtime.own_run is None else runtime.own_run.path
        result = dataclasses.replace(
            loop.run(), metrics=live.newest, run_path=None if run_path is None else pathlib.Path(run_path)
        )
        end_phases()
        if result.stopped is not None:
            loggers.note_stop()
        if self._info is None and result.checkpoint_uuid is not None:
            directory = runtime.core.checkpoint.directory_of(result.checkpoint_uuid)
            result = dataclasses.replace(result, checkpoint_path=directory)
        if runtime.is_chief:
            ending = "completed" if result.stopped is None else f"stopped: {result.stopped.value}"
            runtime.core.train.set_status(ending)
            if self._info is not None and result.stopped is StopReason.SIGNAL:
                # Without the acknowledgement, the master takes exit code 0 for a complete trial.
                runtime.core.preempt.acknowledge_preemption_signal()
            if runtime.own_run is not None and result.stopped is not None:
                runtime.own_run.end_attempt(RunState.STOPPED)
        return result

    def _stop_request(self) -> StopReason | None:
        runtime = self._runtime
        if self._info is not None and runtime.is_chief and runtime.core.preempt.should_preempt():
            return StopReason.PREEMPTED
        signals = runtime.stop_signals
        if signals is not None and signals.requested is not None:
            return StopReason.SIGNAL
        return StopReason.REQUESTED if runtime.is_stop_requested else None

    def _checkpoint_to_load(self, asked: str | None) -> str | None:
        """Return the checkpoint to resume from; None for a new run.

        ``asked`` is ``latest_checkpoint`` of ``fit``; if None, the environment may name a checkpoint. Set
        ``runtime.steps_completed`` from the checkpoint, unless a master has provided the number.
        """
        runtime, info = self._runtime, self._info
        if info is not None and asked is not None:
            return asked
        if info is not None and info.latest_checkpoint is not None:
            if runtime.is_mirrored:
                return str(info.latest_checkpoint)
            logger.warning(
                "latest_checkpoint is not given, so this trial starts anew; pass "
                "fit(latest_checkpoint=det.get_cluster_info().latest_checkpoint) to continue"
            )
        if info is None or runtime.is_mirrored:
            asked = os.environ.get(RESUME_VARIABLE) if asked is None else asked
        if asked == "latest" and info is None:
            asked = runtime.newest_checkpoint()
        if asked is not None:
            metadata = runtime.core.checkpoint.get_metadata(asked)
            runtime.steps_completed = int(metadata.get("steps_completed", 0))
        return asked


def _around_fit(runtime: TrialRuntime) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager in which ``fit`` trains.

    The hyperparameter ``AROUND_FIT_KEY`` names a function (``module:function``) that returns the context manager. Without this
    hyperparameter, the context manager does nothing.
    """
    named = (runtime.hparams or {}).get(AROUND_FIT_KEY)
    if not named:
        return contextlib.nullcontext()
    module, _, function = str(named).partition(":")
    around = getattr(importlib.import_module(module), function)
    return cast("contextlib.AbstractContextManager[Any]", around(runtime.core))


def _is_switched_on(exp_conf: Mapping[str, Any] | None, key: str) -> bool:
    """Return the boolean ``data.dstrial.<key>``; True if the key is missing.

    Raises:
        ValueError: the value is no boolean.
    """
    asked = dstrial_section(exp_conf).get(key)
    if asked is None:
        return True
    if not isinstance(asked, bool):
        raise ValueError(
            f"data.dstrial.{key} is {asked!r}; expected true or false. Write true, or leave it out."
        )
    return asked


def _warn_of_another_length(searcher: Mapping[str, Any], max_length: pytorch.TrainUnit | None) -> None:
    unit = {"batches": pytorch.Batch, "epochs": pytorch.Epoch}.get(str(searcher.get("time_metric")))
    max_time = searcher.get("max_time")
    if unit is None or max_time is None or max_length is None:
        return
    if not isinstance(max_length, unit) or max_length.value != max_time:
        logger.warning(
            "fit(max_length=%s(%s)) differs from searcher.max_time %s %s; the search compares trials at max_time",
            type(max_length).__name__,
            max_length.value,
            max_time,
            searcher["time_metric"],
        )


def _period(length: Length | None, global_batch_size: int) -> pytorch.TrainUnit | None:
    return None if length is None or length.value == 0 else train_unit(length, global_batch_size)


def run_trial(
    trial_class: type[DeepSpeedTrial],
    *,
    experiment: ExperimentConfig | None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | None = None,
    test_mode: bool = False,
) -> FitResult:
    """Train a trial class with the lengths and periods of the experiment config.

    Args:
        trial_class: the user's subclass of ``DeepSpeedTrial``.
        experiment: the experiment config; None under a master, which provides the config.
        run_dir: the run directory; used only without a master.
        resume: the checkpoint to continue from: a uuid, a directory, or ``latest``. Used only without a master, which
            provides the checkpoint.
        test_mode: train two batches, validate once, save one checkpoint and reload it. Also switched on by
            ``DSTRIAL_TEST=1``.

    Returns:
        The result of ``Trainer.fit``.

    Ranks: all, collectively.
    """
    _show_log(identify(os.environ).rank)
    info = cluster_info()
    test_mode = test_mode or os.environ.get(TEST_VARIABLE) == "1"
    config: Mapping[str, Any] = (
        info.trial._config if info is not None else cast(ExperimentConfig, experiment).raw
    )
    hparams = info.trial.hparams if info is not None else cast(ExperimentConfig, experiment).hyperparameters
    with (
        init(
            hparams=dict(hparams),
            exp_conf=None if info is not None else dict(config),
            run_dir=run_dir,
            latest_checkpoint=resume,
        ) as context,
        exits_refused(lambda: "before training"),
    ):
        trial = trial_class(context)
        trainer = Trainer(trial, context)
        require_engine(trial, context)
        size = runtime_of(context).train_batch_size
        max_length = pytorch.Batch(_TEST_BATCHES) if test_mode else searcher_length(config["searcher"], size)
        if max_length is None:
            raise ConfigError([_missing_length(experiment)])
        periods = {key: config.get(key) for key in ("min_validation_period", "min_checkpoint_period")}
        lengths = {key: Length.from_config(value) if value else None for key, value in periods.items()}
        result = trainer.fit(
            checkpoint_period=None if test_mode else _period(lengths["min_checkpoint_period"], size),
            validation_period=None if test_mode else _period(lengths["min_validation_period"], size),
            max_length=max_length,
            reporting_period=pytorch.Batch(1 if test_mode else int(config.get("scheduling_unit") or 100)),
            checkpoint_policy="none" if test_mode else str(config.get("checkpoint_policy") or "best"),
            latest_checkpoint=info.latest_checkpoint if info is not None else resume,
            step_zero_validation=not test_mode and bool(config.get("perform_initial_validation")),
            profiling_enabled=wants_system_metrics(config) and not test_mode,
        )
        if test_mode and result.checkpoint_uuid is not None:
            _reload(context, trainer, result.checkpoint_uuid)
        return result


def _show_log(rank: int) -> None:
    """Set log levels: INFO on rank 0, WARNING on others; add a handler if none exists."""
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if rank == 0:
        for name in ("dstrial", "determined"):
            logging.getLogger(name).setLevel(logging.INFO)


def _reload(context: DeepSpeedTrialContext, trainer: Trainer, uuid: str) -> None:
    again = trainer.fit(
        max_length=pytorch.Batch(_TEST_BATCHES), checkpoint_policy="none", latest_checkpoint=uuid
    )
    assert again.batches_trained == _TEST_BATCHES, again

    if context.distributed.rank == 0:
        logger.info("checkpoint %s was written and loaded again", uuid)


def _missing_length(experiment: ExperimentConfig | None) -> ConfigProblem:
    return ConfigProblem(
        where=f"{experiment.path if experiment is not None else 'experiment config'}: searcher.max_length",
        got="not set",
        expected="how long to train, there or as searcher.max_time with time_metric batches or epochs",
        fix="Set for example searcher.max_length: {batches: 1000}.",
    )
