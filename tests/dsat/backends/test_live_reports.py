"""Publishing a running search's report in the notes of its experiment."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from dstrial.dsat.backends.cluster import ClusterBackend, is_report
from dstrial.dsat.config import SearchConfig

sys.path.append(str(Path(__file__).parents[2] / "master"))
from serving import Master, serving

pytestmark = pytest.mark.process


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with serving(tmp_path) as served:
        yield served


@pytest.fixture
def backend(master: Master, monkeypatch: pytest.MonkeyPatch) -> ClusterBackend:
    """Return a backend that has submitted experiment 1."""
    monkeypatch.setenv("DET_MASTER", master.address)
    monkeypatch.setenv("DET_USER", "determined")
    monkeypatch.setenv("DET_USER_TOKEN", master.tokens["determined"])
    settings: Any = types.SimpleNamespace(experiment=types.SimpleNamespace(raw={}), num_slots=1)
    made = ClusterBackend(cast(SearchConfig, settings))
    made._report_experiment = made.client.get_experiment(1)
    return made


def notes_of(master: Master, experiment: int) -> str:
    return str(master.get(f"/api/v1/experiments/{experiment}").json["experiment"].get("notes") or "")


def test_publish_writes_notes_and_keeps_user_notes(backend: ClusterBackend, master: Master) -> None:
    assert backend.publish(lambda: {"trials": [1]})
    assert is_report(notes_of(master, 1))
    master.send("PATCH", "/api/v1/experiments/1", {"notes": "mine"}, token="determined")
    assert backend.publish(lambda: {"trials": [1, 2]})
    assert notes_of(master, 1) == "mine"


def test_publish_to_deleted_experiment_succeeds_and_stops(backend: ClusterBackend, master: Master) -> None:
    def delete(tx: Any) -> None:
        tx.execute("PRAGMA defer_foreign_keys = ON")
        for table in ("checkpoints", "allocations", "metrics"):
            tx.execute(
                f"DELETE FROM {table} WHERE trial_id IN (SELECT id FROM trials WHERE experiment_id = 1)"
            )
        tx.execute("DELETE FROM trials WHERE experiment_id = 1")
        tx.execute("DELETE FROM experiments WHERE id = 1")

    master.services.database.write(delete)
    assert backend.publish(lambda: {"trials": [1]})
    assert backend.publish(lambda: {"trials": [1]}), "nothing is left to do, nor asked again"
    assert backend._report_experiment is None
