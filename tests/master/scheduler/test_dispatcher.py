"""What the dispatcher assigns to a trial."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored import store_experiment

from dstrial.master.backends import environment
from dstrial.master.scheduler.dispatcher import Dispatcher
from dstrial.master.store.database import Database


def test_dispatcher_trial_gets_every_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_is_free", lambda _port: True)
    launched: list[Any] = []
    reconciler: Any = SimpleNamespace(launch=lambda row, _request: launched.append(row))
    nothing: Any = None
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        store_experiment(database, tmp_path, {"type": "directory", "container_path": str(tmp_path)})
        for table in ("experiments", "trials"):
            database.write(lambda tx, table=table: tx.update(table, 1, {"state": "ACTIVE"}))
        services: Any = SimpleNamespace(database=database, backend=None, state_dir=tmp_path)
        allocation = Dispatcher(services, reconciler, nothing, nothing)._start(1, [0], (), 1)

    assert allocation is not None
    assert launched == [allocation]
    assert set(allocation.ports) == {
        "C10D_PORT",
        "DSTRIAL_DEEPSPEED_PORT",
        "DTRAIN_SSH_PORT",
        "INTER_TRAIN_PROCESS_COMM_PORT_1",
        "INTER_TRAIN_PROCESS_COMM_PORT_2",
    }
