"""``dstrial backup`` and ``restore``, and errors about damaged databases."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.master.client import Client
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

EXPERIMENT = {
    "config": "name: kept\nentrypoint: 'true'\nsearcher: {name: single, metric: loss, max_length: {batches: 1}}\n",
    "modelDefinition": [],
    "activate": False,
}


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path) as running:
        yield running


def submit(client: Client) -> int:
    return int(client.post("/api/v1/experiments", EXPERIMENT)["experiment"]["id"])


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
            for table in tables
        }


def test_backup_under_load_restores_all_rows(master: MasterForTest, tmp_path: Path) -> None:
    client = master.client()
    assert submit(client) == 1
    is_over = threading.Event()

    def keep_submitting() -> None:
        while not is_over.is_set():
            submit(client)

    threads = [threading.Thread(target=keep_submitting) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        copied = master.dstrial("backup", str(tmp_path / "copy.db"))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert copied.returncode == 0, copied.stderr
    assert re.fullmatch(rf"{tmp_path}/copy\.db: \d+\.\d MiB, experiments up to \d+, checked\n", copied.stdout)

    refused = master.dstrial("restore", str(tmp_path / "copy.db"))
    assert refused.returncode == 1
    assert "is in use by process" in refused.stderr
    assert "dstrial down" in refused.stderr

    master.dstrial("down", "--now")
    before = rows(master.state.database_path)
    restored = master.dstrial("restore", str(tmp_path / "copy.db"))
    assert restored.returncode == 0, restored.stderr
    kept = re.search(r"the replaced database is kept in (.*)\n", restored.stdout)
    assert kept is not None
    assert rows(Path(kept[1]) / "master.db") == before
    now, copy = rows(master.state.database_path), rows(tmp_path / "copy.db")
    for table in copy:
        assert now[table] == copy[table], table
    num_experiments = len(copy["experiments"])
    assert num_experiments >= 1

    master.up()
    assert submit(master.client()) == num_experiments + 1


def test_restore_lists_backups_and_repairs_emptied_database(
    master: MasterForTest,
) -> None:
    client = master.client()
    assert [submit(client), submit(client)] == [1, 2]
    assert master.dstrial("restore").stdout.startswith("no copies in ")
    assert master.dstrial("backup").returncode == 0
    listed = master.dstrial("restore")
    assert listed.returncode == 0
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  experiments up to 2 .* MiB  .*/backups/master-.*\.db\n",
        listed.stdout,
    )
    master.dstrial("down", "--now")
    master.state.database_path.write_bytes(b"")

    refused = master.dstrial("up", *master.up_arguments, "--port", "0")

    assert refused.returncode == 1
    assert "master.db is empty; expected the database whose log or copies lie beside it" in refused.stderr
    line = re.search(r"`dstrial (restore [^`]*backups[^`]*)`", refused.stderr)
    assert line is not None, refused.stderr
    assert master.dstrial(*line[1].split()).returncode == 0
    master.up()
    assert submit(master.client()) == 3


def test_status_leaves_wal_of_killed_master_unchanged(master: MasterForTest) -> None:
    submit(master.client())
    master.kill()
    log = master.state.database_path.with_name("master.db-wal")
    before = log.read_bytes()
    assert before

    assert "experiments: 1 paused" in re.sub(" +", " ", master.dstrial("status").stdout)

    assert log.read_bytes() == before
    master.up()
    assert submit(master.client()) == 2
