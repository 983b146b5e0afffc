"""A search that runs as a trial on the master: its files, events and restarts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
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

from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.search_on_master import SearchOnMaster
from dstrial.dsat.core.journal import SEARCH_FILE, SearchRecord
from dstrial.dsat.search_trial import _settings
from dstrial.errors import DstrialError, SearchError


def test_search_trial_receives_settings_without_secrets(
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
    record.restore({"event": "inputs"})

    files = SearchOnMaster(settings, cast(ClusterBackend, None), record)._files()

    assert list(files) == [SEARCH_FILE]
    assert "hunter2" not in files[SEARCH_FILE]
    search: dict[str, Any] = json.loads(files[SEARCH_FILE])
    assert (search["search_id"], search["events"]) == ("0a1b2c3d", [{"event": "inputs"}])
    # The trial reads the secrets from its own experiment config.
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
    """A fake master with one search's experiments; stores or refuses new ones."""

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


_KILLED = {"event": "submitted", "trial_id": 1, "handle": {"attempt": 1, "experiment_id": 1}}
_RESULT = {"event": "result", "trial_id": 1, "seconds": 3.0, "metrics": {"latency": 5.0}}
_SPENT = {"event": "finished", "reason": "the budget is spent", "is_failure": False, "budget_s": 60.0}


def _search(
    directory: Path, *experiments: Any, refusal: str = "", journal: Sequence[dict[str, Any]] = ()
) -> tuple[SearchOnMaster, _Master]:
    path = write_experiment(directory, BASE, resources={"slots_per_trial": 8})
    settings = settings_of(path, "--output", str(directory / "out"), method="predict")
    record, master = SearchRecord(directory, "0a1b2c3d"), _Master(*experiments, refusal=refusal)
    for event in journal:
        record.restore(event)
    return SearchOnMaster(settings, cast(ClusterBackend, master), record), master


def _given(master: _Master) -> list[str]:
    """Return the kinds of the events that the last new experiment received."""
    return [event["event"] for event in json.loads(master.files[SEARCH_FILE])["events"]]


def _read(search: SearchOnMaster) -> list[dict[str, Any]]:
    """Read new events and append them to the record, as the driver does."""
    search._next_poll_s = 0.0
    events = search.events()
    for event in events:
        search._record.restore(event)
    return events


def _places(events: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    return [{**event, "position": place} for place, event in enumerate(events, first)]


@pytest.mark.parametrize(
    ("states", "is_interrupted"),
    [
        ([ExperimentState.CANCELED], True),
        ([ExperimentState.ERROR, ExperimentState.CANCELED], True),
        ([ExperimentState.CANCELED, ExperimentState.ERROR], False),
    ],
)
def test_search_counts_no_attempt_of_canceled_experiment(
    states: list[ExperimentState], is_interrupted: bool, tmp_path: Path
) -> None:
    """The configuration under test did not cause the cancellation."""
    killed = {**_KILLED, "handle": {"attempt": 1, "experiment_id": len(states)}}
    log = "the launcher was killed by SIGKILL"
    ended = [_experiment(number, state, killed, log=log) for number, state in enumerate(states, 1)]
    search, master = _search(tmp_path, *ended, journal=_places([killed], 1))

    assert _read(search) == []
    assert _given(master) == ["submitted", *(["interrupted"] if is_interrupted else [])]


def test_search_that_failed_meanwhile_raises(tmp_path: Path) -> None:
    search, _ = _search(tmp_path)
    search._experiment = _experiment(1, ExperimentState.ERROR, _KILLED, log="ImportError: no such module")
    assert _read(search) == _places([_KILLED], 1)
    with pytest.raises(SearchError, match=r"experiment 1 is error: ImportError: no such module"):
        _read(search)


@pytest.mark.parametrize(
    ("state", "last"),
    [
        (ExperimentState.ERROR, _RESULT),
        (ExperimentState.COMPLETED, _RESULT),
        (ExperimentState.COMPLETED, _SPENT),  # with a smaller budget
    ],
)
def test_next_command_continues_ended_search_in_new_experiment(
    state: ExperimentState, last: dict[str, Any], tmp_path: Path
) -> None:
    ended = _experiment(1, state, _KILLED, last, log="ImportError: no such module")
    search, master = _search(tmp_path, ended, journal=_places([_KILLED], 1))

    assert _read(search) == _places([last], 2)
    assert _read(search) == []
    assert _given(master) == ["submitted", last["event"]]
    assert search._experiment is not None
    assert search._experiment.id == 2


def test_refused_search_raises(tmp_path: Path) -> None:
    search, _ = _search(tmp_path, refusal="you may not")
    with pytest.raises(DstrialError, match=r"refuses the experiment of the search .*you may not"):
        search.events()
