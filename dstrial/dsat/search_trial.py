"""Run a whole search inside one trial on a master.

``python3 -m dstrial.dsat.search_trial`` is the experiment's entrypoint. The context directory contains the experiment config,
the flags and the search's events so far. The search reports every event to the master before acting on the event; a restarted
trial resumes from these events. The ranks of measured configurations are child processes of this trial.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import determined as det
from determined import core
from determined.common.api import bindings

from dstrial.config.documents import yaml_text
from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.local import LocalBackend
from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.cli import SearchFlags
from dstrial.dsat.config import SearchConfig, read_config, with_parallel
from dstrial.dsat.core.journal import EVENTS_GROUP, SEARCH_FILE, SearchRecord
from dstrial.dsat.core.outcome import TrialResult
from dstrial.dsat.driver import Driver, recorded_inputs
from dstrial.local.json_files import read_json
from dstrial.ranks.stop_signals import noted_signals
from dstrial.scratch import scratch_directory


def main() -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    info = det.get_cluster_info()
    assert info is not None, "it is the trial of a master"
    search = read_json(Path(SEARCH_FILE))
    with (
        scratch_directory("dstrial-search-") as directory,
        core.init(distributed=core.DummyDistributedContext()) as context,
        noted_signals() as signals,
    ):
        settings = _settings(search, info.trial, directory)
        master = ClusterBackend(settings, lambda: bool(signals))
        journal = _Journal(master, info.trial)
        record = SearchRecord(directory, search["search_id"], journal.report)
        earlier = journal.events()
        for event in [*search["events"], *earlier]:
            record.restore(event)
        journal.num_events = len(search["events"])
        for event in earlier:  # the first report of a run archives those of earlier runs
            journal.report(event)
        is_preempted = False

        def watch_preemption(_trials: Sequence[TrialResult]) -> None:
            nonlocal is_preempted
            if not signals and context.preempt.should_preempt():
                is_preempted = True
                signals.append(signal.SIGTERM)

        with record.lock():
            ranks = _Ranks(settings, record, master, journal, context)
            inputs = recorded_inputs(record)
            end = Driver(settings, record, inputs, lambda: ranks, _print_line, watch_preemption).run(signals)
    sys.stderr.write(f"dsat: the search ends: {end.reason}\n")
    return 0 if end.stopped_by is None or is_preempted else 128 + int(end.stopped_by)


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # to the trial's log


def _settings(search: Mapping[str, Any], trial: det.TrialInfo, directory: Path) -> SearchConfig:
    own = {name: trial._config[name] for name in search["private"]}
    config_path, space_path = directory / "given.yaml", directory / "space.yaml"
    config_path.write_text(yaml_text({**search["experiment"], **own}), encoding="utf-8")
    if search["space"] is not None:
        space_path.write_text(search["space"], encoding="utf-8")
    given = {
        "config_path": str(config_path),
        "model_dir": ".",
        "space": None if search["space"] is None else str(space_path),
        "output": str(directory),
    }
    flags = SearchFlags(**{**search["flags"], **given})
    return with_parallel(read_config(flags), search["num_parallel"])


class _Journal:
    """Reads and writes a search's events, which the master stores as rows of metrics."""

    def __init__(self, master: ClusterBackend, trial: det.TrialInfo) -> None:
        self._master = master
        self._trial = trial
        self.experiment = master.retry_until_available(
            lambda: master.client.get_experiment(trial.experiment_id)
        )
        self.num_events = 0

    def events(self) -> list[dict[str, Any]]:
        rows = self._master.retry_until_available(self._rows)
        return [rows[number] for number in sorted(rows)]

    def _rows(self) -> dict[int, dict[str, Any]]:
        trials = self.experiment.list_trials()
        rows = [row for trial in trials for row in trial.iter_metrics(EVENTS_GROUP)]
        return {int(row.steps_completed): json.loads(row.metrics["event"]) for row in rows}

    def report(self, event: Mapping[str, Any]) -> None:
        """Store an event on the master; block until the master has confirmed it."""
        # Determined's ``report_metrics`` would return earlier, and lose the event during an outage.
        number = self.num_events + 1
        values = {**event.get("metrics", {}), "event": json.dumps(event)}
        metrics = bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=values),
            stepsCompleted=number,
            trialId=self._trial.trial_id,
            trialRunId=self._trial._trial_run_id,
        )
        body = bindings.v1ReportTrialMetricsRequest(group=EVENTS_GROUP, metrics=metrics)
        is_repeated = False

        def report() -> None:
            nonlocal is_repeated
            # The master may have died between storing the row and answering; a row cannot be reported twice.
            if not (is_repeated and number in self._rows()):
                is_repeated = True
                bindings.post_ReportTrialMetrics(
                    self._master.session, body=body, metrics_trialId=self._trial.trial_id
                )

        self._master.retry_until_available(report)
        self.num_events = number


class _Ranks(LocalBackend):
    """Back end that measures configurations within this trial; reports to the master."""

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,
        master: ClusterBackend,
        journal: _Journal,
        context: core.Context,
    ) -> None:
        master.show_in(journal.experiment)
        super().__init__(settings, record)
        self._master, self._journal, self._context = master, journal, context

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        return {**super().start(spec), "experiment_id": self._journal.experiment.id}

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        return self._master.publish(report)

    def finish(self, results: Mapping[str, str]) -> None:
        super().finish(results)
        self._master.show_results(self._journal.experiment, results)

        def store() -> None:
            metadata = {"steps_completed": 0, "dsat": True}
            with self._context.checkpoint.store_path(metadata) as (path, _uuid):
                for name, text in results.items():
                    (Path(path) / name).write_text(text, encoding="utf-8")

        self._master.retry_until_available(store)

    def poll(self) -> list[Ended]:
        ended = super().poll()
        for one in ended:
            _print_line(self.output_of(one.trial_id))
        return ended


if __name__ == "__main__":
    sys.exit(main())
