"""A rank that measures one configuration after the other.

``python -m dstrial.dsat.rank.rank_server``.

Its supervisor writes tasks to its standard input, one JSON object per line, and reads results from a pipe. The process
group lives as long as the rank; a trial is built, measured and torn down again for every task. Not meant to be typed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dstrial.launch.imported_ahead  # noqa: F401  # isort: skip  # which a fork has imported
import torch
from determined import core

from dstrial.dsat.core.outcome import Outcome, outcome_to_json
from dstrial.dsat.rank.cleanup import ProcessState
from dstrial.dsat.rank.context import failure_of, limits_from
from dstrial.dsat.rank.leak_check import ProcessUsage, process_usage, reset_host_peak
from dstrial.dsat.rank.measure import measure_trial
from dstrial.dsat.rank.step_timer import StepTimer
from dstrial.engine.engine_hooks import observe_engines
from dstrial.launch.trial_import import import_trial
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import ControlChannel, timeout_from_environ
from dstrial.ranks.identity import identify
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.trial import DeepSpeedTrial

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    """Measure tasks until the supervisor closes the pipe. Ranks: all, collectively."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.rank.rank_server")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    parser.add_argument("--answers", type=int, required=True)
    options = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    exp_conf = _experiment(options.config, options.context_dir)
    os.chdir(options.context_dir)
    rank: RankServer | None = None
    with os.fdopen(options.answers, "w", encoding="utf-8") as answers:
        for order in _orders():
            if rank is None:
                rank = RankServer(options.trial, exp_conf)
            answer = {"number": order["number"], **rank.measure(order["hparams"])}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


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
