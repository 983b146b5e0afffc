"""What the trial of a search is given: all that its command knows, but no secrets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import determined as det
import pytest
import yaml
from determined.common.api import errors
from determined.experimental.client import ExperimentState
from searching import settings_of, write_experiment
from surfaces import BASE

from dstrial.dsat.backends.base import SearchEndedError
from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.search_on_master import SearchOnMaster
from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.core.journal import SEARCH_FILE, SearchRecord
from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.search_trial import _settings
from dstrial.errors import DstrialError, SearchError


def test_trial_of_search_is_given_its_command_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"environment_variables": ["AWS_SECRET_ACCESS_KEY=hunter2"]}
    path = write_experiment(tmp_path, BASE, resources={"slots_per_trial": 8}, environment=environment)
    space, batch = tmp_path / "space.yaml", tmp_path / "batch.pt"
    space.write_text(yaml.safe_dump({"zero_optimization.offload_optimizer.device": ["none", "cpu"]}))
    batch.touch()
    flags = ("--space", str(space), "--sample-batch", str(batch), "-z", "1", "2", "--max-trials", "9")
    settings = settings_of(path, *flags, "--output", str(tmp_path / "out"), method="predict")
    record = SearchRecord(tmp_path, "0a1b2c3d")

    files = SearchOnMaster(settings, cast(ClusterBackend, None), record)._files([{"event": "inputs"}])

    assert list(files) == [SEARCH_FILE]
    assert "hunter2" not in files[SEARCH_FILE]
    search: dict[str, Any] = json.loads(files[SEARCH_FILE])
    assert (search["search_id"], search["events"]) == ("0a1b2c3d", [{"event": "inputs"}])
    # The trial has the secrets by its own config.
    trial = det.TrialInfo(1, 1, 0, {}, {"environment": environment}, 0, 0, False, None)
    for file in (space, batch, path):
        file.unlink()
    monkeypatch.chdir(tmp_path / "model")
    (tmp_path / "there").mkdir()
    there = _settings(search, trial, tmp_path / "there")
    assert there.written == settings.written
    assert there.options == settings.options
    assert there.space.own() == settings.space.own()
    assert there.space.extra == settings.space.extra


class _Master:
    """A master with the experiments of one search, which keeps or refuses what it is given."""

    find = ClusterBackend.find

    def __init__(self, *experiments: Any, refusal: str = "") -> None:
        self._experiments = [*experiments]
        self._refusal = refusal
        self.files: dict[str, str] = {}

    def _labelled(self, _label: str) -> list[Any]:
        return self._experiments

    def retry_until_available(self, call: Callable[[], Any]) -> Any:
        return call()

    def tolerate_outage(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def create(self, _config: dict[str, Any], _label: str, files: dict[str, str]) -> Any:
        if self._refusal:
            raise errors.ForbiddenException(self._refusal)
        self.files = files
        self._experiments.append(_experiment(len(self._experiments) + 1, ExperimentState.ACTIVE))
        return self._experiments[-1]


def _experiment(number: int, state: ExperimentState, *events: dict[str, Any], log: str = "") -> Any:
    rows = [
        SimpleNamespace(steps_completed=place, metrics={"event": json.dumps(event)})
        for place, event in enumerate(events, 1)
    ]
    trial = SimpleNamespace(
        state=SimpleNamespace(value="RUNNING"),
        iter_metrics=lambda _group: rows,
        iter_logs=lambda tail: log.splitlines(),
    )
    return SimpleNamespace(id=number, state=state, reload=lambda: None, list_trials=lambda: [trial])


_KILLED = {"event": "submitted", "trial_id": 1, "handle": {"attempt": 1}, "candidate": {"stage": 2}}
_RESULT = {"event": "result", "trial_id": 1, "seconds": 3.0, "metrics": {"latency": 5.0}}


def _search(directory: Path, *experiments: Any, refusal: str = "") -> tuple[SearchOnMaster, _Master]:
    path = write_experiment(directory, BASE, resources={"slots_per_trial": 8})
    settings = settings_of(path, "--output", str(directory / "out"), method="predict")
    record, master = SearchRecord(directory, "0a1b2c3d"), _Master(*experiments, refusal=refusal)
    record.append("submitted", {"trial_id": 1, "handle": {"experiment_id": 1}})
    return SearchOnMaster(settings, cast(ClusterBackend, master), record), master


def _attempts(master: _Master) -> list[Any]:
    return [event["handle"].get("attempt") for event in json.loads(master.files[SEARCH_FILE])["events"]]


SPEC = TrialSpec(1, {}, {}, "")


@pytest.mark.parametrize(
    ("states", "attempts"),
    [
        ([ExperimentState.ERROR], [1]),
        ([ExperimentState.CANCELED], [None]),
        ([ExperimentState.ERROR, ExperimentState.CANCELED], [None]),
        ([ExperimentState.CANCELED, ExperimentState.ERROR], [1]),
    ],
)
def test_search_counts_attempts_of_newest_experiment(
    states: list[ExperimentState], attempts: list[Any], tmp_path: Path
) -> None:
    """An experiment that was canceled was not killed by a configuration."""
    ended = [_experiment(number, state, _KILLED) for number, state in enumerate(states, 1)]
    search, master = _search(tmp_path, *ended)

    assert not search.adopt(SPEC, {})
    assert search.start(SPEC) == {"experiment_id": len(states) + 1}
    assert _attempts(master) == attempts


def test_search_takes_results_from_the_journal_of_its_trial(tmp_path: Path) -> None:
    search, _ = _search(tmp_path, _experiment(1, ExperimentState.COMPLETED, _KILLED, _RESULT))

    assert search.adopt(SPEC, {})
    (ended,) = search.poll()
    assert (ended.trial_id, ended.outcome, ended.seconds) == (1, Measured({"latency": 5.0}), 3.0)
    assert ended.candidate == {"stage": 2}
    assert search.poll() == []


def _end(budget_s: float | None) -> dict[str, Any]:
    return {"event": "finished", "reason": "it ended", "is_failure": False, "budget_s": budget_s}


@pytest.mark.parametrize("state", [ExperimentState.COMPLETED, ExperimentState.ACTIVE])
def test_search_that_finished_in_its_trial_hands_its_end(tmp_path: Path, state: ExperimentState) -> None:
    search, master = _search(tmp_path, _experiment(1, state, _KILLED, _end(None)))

    assert search.start(SPEC) == {"experiment_id": 1}
    with pytest.raises(SearchEndedError, match="it ended") as caught:
        search.poll()
    assert caught.value.event == _end(None)
    assert not master.files


def test_search_with_larger_budget_goes_on_in_another_experiment(tmp_path: Path) -> None:
    ended = _experiment(1, ExperimentState.COMPLETED, _KILLED, _end(60.0))
    search, master = _search(tmp_path, ended)

    assert search.start(SPEC) == {"experiment_id": 2}
    assert _attempts(master) == [None]
    search._experiment, search._next_poll_s = ended, 0.0
    assert search.poll() == []
    assert search._experiment.id == 3


def test_search_that_ran_out_of_memory_goes_on_in_another_experiment(tmp_path: Path) -> None:
    search, master = _search(tmp_path)
    search.start(SPEC)
    reasons = ("the launcher was killed by SIGKILL", "ImportError: no such module")
    for number, log in enumerate(reasons, 1):
        search._experiment = _experiment(number, ExperimentState.ERROR, _KILLED, log=log)
        search._next_poll_s = 0.0
        if number == 1:
            assert search.poll() == []
            assert _attempts(master) == [1]
    with pytest.raises(SearchError, match=r"experiment 2 is error: ImportError: no such module"):
        search.poll()


def test_refused_search_raises(tmp_path: Path) -> None:
    search, _ = _search(tmp_path, refusal="you may not")
    with pytest.raises(DstrialError, match=r"refuses the experiment of the search .*you may not"):
        search.start(SPEC)
