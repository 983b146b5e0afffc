"""Measure configurations of a trial class one after the other in persistent ranks.

Rank 0 reads tasks from a file that the search appends to. All ranks build, measure and tear down a trial for each task; rank 0
appends its result to another file. The process group lives as long as the ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import determined as det
import numpy as np
import torch
from determined import core

from dstrial.dsat.core.journal import RESULTS_NAME, TASKS_NAME
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, failure_line, outcome_to_json
from dstrial.dsat.rank.cleanup import ProcessState, ProcessUsage, process_usage, reset_host_peak
from dstrial.dsat.rank.context import failure_of, limits_from
from dstrial.dsat.rank.microbench import with_machine
from dstrial.dsat.rank.step_timer import StepTimer
from dstrial.engine.engine_hooks import observe_engines
from dstrial.launch.trial_import import import_trial
from dstrial.local.json_files import JsonLinesTail, append_json_line
from dstrial.local.script_variables import SETTINGS_KEY
from dstrial.loop.data.training import TrainingStream, agreed_epoch_length
from dstrial.loop.loop import require_engine
from dstrial.process_state import read_state
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import ControlChannel, timeout_from_environ
from dstrial.ranks.identity import identify
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.trial import DeepSpeedTrial

_POLL_PERIOD_S = 0.02
_MAX_IDLE_S = 60.0  # far below the timeout of the control channel, on which other ranks wait for rank 0
# Grace period in which a failed rank tears down and waits for the other ranks, which may hang in a collective.
_GRACE_S = 10.0
_ENDS_RANKS = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM, FailureKind.COMMUNICATION, FailureKind.TIMEOUT)


def serve(trial: str, exp_conf: dict[str, Any] | None, directory: Path, search: str) -> NoReturn:
    """Measure tasks as long as the search runs, then exit. Ranks: all, collectively.

    ``directory`` has the files of tasks and results. ``search`` identifies the search's process: ``pid:start time``.
    """
    tail = JsonLinesTail(directory / TASKS_NAME)
    pid, _, ticks = search.partition(":")
    if exp_conf is None and (info := det.get_cluster_info()) is not None:
        exp_conf = info.trial._config
    server = RankServer(trial, exp_conf)
    while (task := server.next_task(tail, int(pid), int(ticks))) is not None:
        results = server.allgather(server.measure(task["hparams"]))
        reason = _why_to_end(results)
        if server.rank == 0:
            row = {"number": task["number"], "respawned": reason, **_merge(results)}
            append_json_line(directory / RESULTS_NAME, row)
        if reason:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that ran out of memory may hang in its exit handlers


class RankServer:
    """A persistent rank, which measures the tasks of a search.

    Ranks: all, collectively.
    """

    def __init__(self, trial: str, exp_conf: dict[str, Any] | None) -> None:
        identity = identify(os.environ)
        process_group.init_process_group(identity, timeout_s=timeout_from_environ())
        self._device = process_group.device(identity)
        self._channel = ControlChannel(identity)
        self._exp_conf = exp_conf
        self._seed = int(((exp_conf or {}).get("reproducibility") or {}).get("experiment_seed") or 0)
        self._trial_name = trial
        self._trial_class: type[DeepSpeedTrial] | None = None
        self._state: ProcessState | None = None
        self._baseline: ProcessUsage | None = None
        self.rank = identity.rank
        self._grace: threading.Timer | None = None

    def next_task(self, tail: JsonLinesTail, search_pid: int, search_ticks: int) -> dict[str, Any] | None:
        """Return the next task, which rank 0 reads; None if the search has ended.

        ``search_pid`` and ``search_ticks`` (start time) identify the search's process.

        Ranks: all, collectively.
        """
        while True:
            task: dict[str, Any] | None = {}
            give_up_at_s = time.monotonic() + _MAX_IDLE_S
            while self.rank == 0 and not task and time.monotonic() < give_up_at_s:
                rows = tail.poll()[1]  # at most one: the search writes the next task after this result
                state = read_state(search_pid)
                if state is None or state.has_ended or state.start_ticks != search_ticks:
                    task = None
                    break
                task = rows[0] if rows else {}
                if not rows:
                    time.sleep(_POLL_PERIOD_S)
            received: dict[str, Any] | None = self._channel.broadcast(task)
            if received != {}:
                return received

    def allgather(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the results of all ranks, by rank. Ranks: all, collectively."""
        try:
            return self._channel.allgather(result)
        finally:
            if self._grace is not None:
                self._grace.cancel()

    def measure(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        """Build, measure and tear down a trial.

        Returns a dictionary: ``outcome``; ``grown``, the resources that grew since the first task; ``details``, the
        ``ProcessUsage``.

        Ranks: all, collectively.
        """
        timer = StepTimer(limits_from(hparams))
        outcome = self._train(hparams, timer)
        if isinstance(outcome, Failure):
            # If the other ranks never reach the all-gather, this rank exits, and its launcher ends them.
            self._grace = threading.Timer(_GRACE_S, _exit_with_failure, (outcome,))
            self._grace.daemon = True
            self._grace.start()
        engines = timer.forget_engines()
        if self._state is not None:
            self._state.restore(engines)
        usage = process_usage()
        grown = [] if self._baseline is None else usage.grown_over(self._baseline)
        self._baseline = self._baseline or usage
        return {"outcome": outcome_to_json(outcome), "grown": grown, "details": dataclasses.asdict(usage)}

    def _train(self, hparams: Mapping[str, Any], timer: StepTimer) -> Outcome:
        reset_host_peak()
        try:
            if self._trial_class is None:
                self._trial_class = import_trial(self._trial_name, Path())
            if self._state is None:
                self._state = ProcessState()
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.manual_seed(self._seed)
            context = self._context(hparams)
            with observe_engines(timer):
                return measure_trial(self._trial_class(context), context, timer)
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # reported to the search
            failure = failure_of(error, timer)
            sys.stderr.write(f"dsat: {failure.kind.value}: {failure.message}\n")
            sys.stderr.flush()
            return failure

    def _context(self, hparams: Mapping[str, Any]) -> DeepSpeedTrialContext:
        size = self._channel.size
        return DeepSpeedTrialContext(
            core_context=core._dummy_init(distributed=self._channel),
            trial_seed=self._seed,
            hparams=dict(hparams),
            slots_per_trial=size,
            num_gpus=size if self._device.type != "cpu" else 0,
            exp_conf=self._exp_conf,
            steps_completed=0,
            enable_tensorboard_logging=False,
            device=self._device,
        )


def measure_trial(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, timer: StepTimer) -> Measured:
    """Train until ``timer`` is done, without validation, reports or checkpoints.

    The caller must build the trial inside ``observe_engines(timer)``.

    Ranks: all, collectively.
    """
    require_engine(trial, context)
    runtime = runtime_of(context)
    loader = trial.build_training_data_loader() if runtime.mpu.should_build_data_loader else None
    stream = TrainingStream(
        loader,
        runtime.adapter,
        context.distributed.rank,
        runtime.trial_seed or 0,
        runtime.repro_checks_disabled,
    )
    lengths = (runtime.mpu.should_build_data_loader, loader is not None, stream.epoch_length, None)
    epoch_length = runtime.epoch_length = agreed_epoch_length(context.distributed.allgather(lengths))
    iterator = stream.open(0)
    runtime.bind_training_iterator(iterator)
    runtime.set_training(True)
    calls = range(runtime.train_calls_per_batch)
    try:
        for batch_idx in itertools.count():
            if timer.is_done:
                break
            runtime.current_batch_idx = batch_idx
            for _ in calls:
                trial.train_batch(iterator, batch_idx // epoch_length if epoch_length else 0, batch_idx)
    finally:
        runtime.bind_training_iterator(None)
    return with_machine(timer.result(), context.get_hparams().get(SETTINGS_KEY), timer.dtype)


def _exit_with_failure(failure: Failure) -> None:
    sys.stderr.write(f"{failure_line(failure)}\n")
    sys.stderr.flush()
    os._exit(1)


def _merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rank 0's measurement; if a rank failed, the probable first failure."""
    failures = [one["outcome"] for one in results if "failure" in one["outcome"]]
    lost = FailureKind.COMMUNICATION.name
    outcome = min(failures, key=lambda one: one["failure"]["kind"] == lost, default=results[0]["outcome"])
    return {**outcome, "details": results[0]["details"]}


def _why_to_end(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why these ranks cannot measure another task; empty if they can."""
    failure = _merge(results).get("failure")
    if failure is not None and FailureKind[failure["kind"]] in _ENDS_RANKS:
        return FailureKind[failure["kind"]].value
    for rank, one in enumerate(results):
        if one["grown"]:
            return f"rank {rank} does not come back to what it was: {', '.join(one['grown'])}"
    return ""
