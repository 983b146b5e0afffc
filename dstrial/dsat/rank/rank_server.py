"""Ranks that measure one configuration after the other.

``python -m dstrial.dsat.rank.rank_server``.

``dstrial.launch`` starts them for a search. Rank 0 reads tasks that the search appends to a file, and tells the others; all
measure, and rank 0 appends the result to another file. The process group lives as long as the ranks; a trial is built, measured
and torn down again for every task. Not meant to be typed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dstrial.launch.imported_ahead  # noqa: F401  # isort: skip  # which a fork has imported
import torch
from determined import core

from dstrial.dsat.core.journal import RESULTS_NAME, TASKS_NAME
from dstrial.dsat.core.outcome import (
    Failure,
    FailureKind,
    Outcome,
    failure_line,
    outcome_to_json,
)
from dstrial.dsat.rank.cleanup import ProcessState
from dstrial.dsat.rank.context import failure_of, limits_from
from dstrial.dsat.rank.leak_check import ProcessUsage, process_usage, reset_host_peak
from dstrial.dsat.rank.measure import measure_trial
from dstrial.dsat.rank.step_timer import StepTimer
from dstrial.engine.engine_hooks import observe_engines
from dstrial.launch.trial_import import import_trial
from dstrial.local.json_files import JsonLinesTail, append_json_line
from dstrial.process_state import read_state
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import ControlChannel, timeout_from_environ
from dstrial.ranks.identity import identify
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.trial import DeepSpeedTrial

_POLL_S = 0.02
_RETRY_S = 5.0
_IDLE_S = 60.0  # far below the control channel's timeout: the other ranks wait for rank 0 on it
# Grace period in which a rank that failed tears down and waits for the others, which may hang in a collective.
_GRACE_S = 10.0
_ENDS_RANKS = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM, FailureKind.COMMUNICATION, FailureKind.TIMEOUT)


class RankServer:
    """The state between two configurations. Ranks: all, collectively."""

    def __init__(self, trial: str, exp_conf: dict[str, Any] | None) -> None:
        identity = identify(os.environ)
        process_group.init_process_group(identity, timeout_s=timeout_from_environ())
        self._device = process_group.device(identity)
        self._channel = ControlChannel(identity)
        self._exp_conf = exp_conf
        self._seed = int((((exp_conf or {}).get("reproducibility") or {}).get("experiment_seed")) or 0)
        self._trial_name = trial
        self._trial_class: type[DeepSpeedTrial] | None = None
        self._state: ProcessState | None = None
        self.baseline: ProcessUsage | None = None
        self.rank = identity.rank
        self._grace: threading.Timer | None = None

    def next_task(self, tasks: _Tasks) -> dict[str, Any] | None:
        """Return rank 0's next task; None once the search has ended. Ranks: all."""
        while True:
            task = tasks.next(_IDLE_S) if self.rank == 0 else None
            told: dict[str, Any] | None = self._channel.broadcast(task)
            if told != {}:
                return told

    def agreed(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what all ranks say. Ranks: all, collectively."""
        try:
            return self._channel.allgather(said)
        finally:
            if self._grace is not None:
                self._grace.cancel()

    def measure(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        """Build, measure and take out a trial.

        Returns ``outcome``; ``grown``, the resources that did not return to their size after the first configuration;
        ``details``, seconds of each part and the ``ProcessUsage``.

        Ranks: all, collectively.
        """
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        timer = StepTimer(limits_from(hparams), measures_bare=True)
        outcome, built_s, cpu_built_s = self._trained(hparams, timer)
        measured_s, cpu_measured_s = time.perf_counter(), time.process_time()
        if isinstance(outcome, Failure):
            # The others may never come: then this rank ends itself, and its launcher ends them.
            self._grace = threading.Timer(_GRACE_S, _end_with_failure, (outcome,))
            self._grace.daemon = True
            self._grace.start()
        engines = timer.forget_engines()
        assert self._state is not None or not engines
        if self._state is not None:
            self._state.restore(engines)
        left = process_usage()
        grown = [] if self.baseline is None else left.grown_over(self.baseline)
        self.baseline = self.baseline or left
        parts_s = {
            "build_s": built_s - began_s,
            "measure_s": measured_s - built_s,
            "tear_down_s": time.perf_counter() - measured_s,
            "measure_cpu_s": cpu_measured_s - cpu_built_s,
            "other_cpu_s": cpu_built_s - cpu_began_s + time.process_time() - cpu_measured_s,
        }
        details = {**parts_s, **dataclasses.asdict(left)}
        return {"outcome": outcome_to_json(outcome), "grown": grown, "details": details}

    def _trained(self, hparams: Mapping[str, Any], timer: StepTimer) -> tuple[Outcome, float, float]:
        built_s, cpu_built_s = time.perf_counter(), time.process_time()
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
                trial = self._trial_class(context)
                built_s, cpu_built_s = time.perf_counter(), time.process_time()
                outcome: Outcome = measure_trial(trial, context, timer)
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # told to whoever has ordered the measurement
            outcome = failure_of(error, timer)
            sys.stderr.write(f"dsat: {outcome.kind.value}: {outcome.message}\n")
            sys.stderr.flush()
        return outcome, built_s, cpu_built_s

    def _context(self, hparams: Mapping[str, Any]) -> DeepSpeedTrialContext:
        """Return a new context with a silent core context: nothing is reported from here."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure tasks as long as the search lives. Ranks: all, collectively."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.rank.rank_server")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    parser.add_argument("--tasks", type=Path, required=True, help="directory of the files")
    parser.add_argument("--search", required=True, help="PID:START_TICKS of the search")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    exp_conf = _experiment(options.config, options.context_dir)
    tasks = _Tasks(options.tasks.absolute(), options.search)
    os.chdir(options.context_dir)
    server = RankServer(options.trial, exp_conf)
    while (task := server.next_task(tasks)) is not None:
        said = server.agreed(server.measure(task["hparams"]))
        reason = _why_to_end(said)
        if server.rank == 0:
            tasks.answer({"number": task["number"], "respawned": reason, **_result_of(said)})
        if reason:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that ran out of memory may hang in its exit handlers


class _Tasks:
    """The files of a search's tasks and their results, as rank 0 sees them."""

    def __init__(self, directory: Path, search: str) -> None:
        self._tail = JsonLinesTail(directory / TASKS_NAME)
        self._results_path = directory / RESULTS_NAME
        self._waiting: list[dict[str, Any]] = []
        pid, _, ticks = search.partition(":")
        self._search = int(pid), int(ticks)

    def next(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next task; ``{}`` if none comes in time, None without a search."""
        give_up_at_s = time.monotonic() + wait_s
        while not self._waiting:
            self._waiting += self._tail.poll()[1]
            state = read_state(self._search[0])
            if state is None or state.has_ended or state.start_ticks != self._search[1]:
                return None
            if time.monotonic() > give_up_at_s:
                return {}
            if not self._waiting:
                time.sleep(_POLL_S)
        return self._waiting.pop(0)

    def answer(self, row: Mapping[str, Any]) -> None:
        """Append a result; while the disk is full, wait."""
        while True:
            try:
                append_json_line(self._results_path, row)
            except OSError as error:
                sys.stderr.write(f"dsat: a result cannot be written ({error}); trying again\n")
                time.sleep(_RETRY_S)
            else:
                return


def _end_with_failure(failure: Failure) -> None:
    sys.stderr.write(f"{failure_line(failure)}\n")
    sys.stderr.flush()
    os._exit(1)


def _result_of(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rank 0's measurement, or the failure that caused the others."""
    failures = [one["outcome"] for one in said if "failure" in one["outcome"]]
    lost = FailureKind.COMMUNICATION.name
    outcome = min(failures, key=lambda one: one["failure"]["kind"] == lost, default=said[0]["outcome"])
    return {**outcome, "details": said[0]["details"]}


def _why_to_end(said: Sequence[Mapping[str, Any]]) -> str:
    """Return why other ranks are to measure what comes next; empty if these may."""
    failure = _result_of(said).get("failure")
    if failure is not None and FailureKind[failure["kind"]] in _ENDS_RANKS:
        return FailureKind[failure["kind"]].value
    for rank, one in enumerate(said):
        if one["grown"]:
            return f"rank {rank} does not come back to what it was: {', '.join(one['grown'])}"
    return ""


def _experiment(path: Path | None, context_dir: Path) -> dict[str, Any] | None:
    if path is None:
        import determined as det

        info = det.get_cluster_info()
        found: dict[str, Any] | None = None if info is None else info.trial._config
        return found
    from dstrial.config import load_experiment

    return load_experiment(path, context_dir, slots=identify(os.environ).world_size).raw


if __name__ == "__main__":
    main()
