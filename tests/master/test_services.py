"""Services of a running master."""

from __future__ import annotations

from pathlib import Path

from dstrial.master.backends.devices import Slot
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.status import ENGINE_NAME, HOSTS_NAME
from dstrial.master.pubsub import PubSub
from dstrial.master.services import open_services
from dstrial.master.settings import MasterSettings
from dstrial.master.store.database import Database


def test_agent_backend_deletes_stale_status_files(tmp_path: Path) -> None:
    for name in (HOSTS_NAME, ENGINE_NAME):
        (tmp_path / name).write_text("of an earlier master")
    pubsub = PubSub()
    database = Database(tmp_path / "master.db", pubsub.publish)
    services = open_services(
        settings=MasterSettings.load(),
        state_dir=tmp_path,
        database=database,
        pubsub=pubsub,
        slots=(Slot(0, "cpu", "cpu", "0"),),
        port=8080,
        has_passwords=False,
    )
    try:
        assert isinstance(services.backend, LocalBackend)
        assert [slot.id for slot in services.slots] == [0]
        assert not [name for name in (HOSTS_NAME, ENGINE_NAME) if (tmp_path / name).exists()]
    finally:
        services.close()
        database.close()
