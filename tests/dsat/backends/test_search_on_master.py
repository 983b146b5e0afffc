"""What the trial of a search is given: all that its command knows, but no secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import determined as det
import pytest
import yaml
from determined.common.api import errors
from searching import settings_of, write_experiment
from surfaces import BASE

from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.search_on_master import SearchOnMaster
from dstrial.dsat.core.journal import SEARCH_FILE, SearchRecord
from dstrial.dsat.search_trial import _settings
from dstrial.errors import DstrialError


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
    """A master that has no experiment of a search, and keeps or refuses what it is given."""

    def __init__(self, refusal: str = "") -> None:
        self.files: dict[str, str] = {}
        self._refusal = refusal

    def find(self, _label: str) -> None:
        return None

    def retry_until_available(self, call: Callable[[], Any]) -> Any:
        return call()

    def create(self, _config: dict[str, Any], _label: str, files: dict[str, str]) -> Any:
        if self._refusal:
            raise errors.ForbiddenException(self._refusal)
        self.files = files
        return SimpleNamespace(id=7)


def test_search_that_was_canceled_in_order_has_not_been_killed(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, BASE, resources={"slots_per_trial": 8})
    settings = settings_of(path, "--output", str(tmp_path / "out"), method="predict")
    record, master = SearchRecord(tmp_path, "0a1b2c3d"), _Master()
    handle = {"attempt": 1, "experiment_id": 3}
    known: list[dict[str, Any]] = [{"event": "submitted", "trial_id": 1, "handle": handle}]

    SearchOnMaster(settings, cast(ClusterBackend, master), record).begin(known)

    (event,) = json.loads(master.files[SEARCH_FILE])["events"]
    assert event["handle"] == {"experiment_id": 3}
    refusing = cast(ClusterBackend, _Master("you may not"))
    with pytest.raises(DstrialError, match=r"refuses the experiment of the search .*you may not"):
        SearchOnMaster(settings, refusing, record).begin(known)
