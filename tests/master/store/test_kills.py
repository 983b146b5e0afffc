"""SIGKILL of the database writer, also during checkpoints of the WAL."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_start

from dstrial.master.store.database import Database

pytestmark = pytest.mark.process

WRITER = """
import sys, threading
from pathlib import Path
from dstrial.master.store.database import Database

database = Database(Path(sys.argv[1]))
database.write(lambda tx: None)
database._writer_connection.execute("PRAGMA wal_autocheckpoint = 12")

def write(tx):
    tx.execute("INSERT INTO work (kind, experiment_id, payload, created_us) VALUES ('gc', 1, hex(randomblob(900)), 1)")
    number = tx.execute("SELECT last_insert_rowid()").fetchone()[0]
    tx.execute("UPDATE work SET created_us = ? WHERE id = abs(random()) % ?", (number, number))
    return number

def read():
    while True:
        with database.read() as connection:
            connection.execute("SELECT SUM(LENGTH(payload)) FROM work").fetchone()

threading.Thread(target=read, daemon=True).start()
while True:
    print(database.write(write), flush=True)
"""


@pytest.mark.exhaustive("[20]")
@pytest.mark.parametrize("num_kills", [20, 40])
def test_killed_writer_loses_no_confirmed_row(tmp_path: Path, num_kills: int) -> None:
    seeded = random.Random(17)
    path, log = tmp_path / "master.db", tmp_path / "writer.log"
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    confirmed = 0
    for _ in range(num_kills):
        with log.open("wb") as told:
            command = [sys.executable, str(script), str(path)]
            process = warm_start.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT)
        give_up_at_s = time.monotonic() + 60
        # Wait for output rather than time: more than ten rows are confirmed before each kill.
        while len(log.read_text().splitlines()) < 14:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at_s
            time.sleep(0.005)
        time.sleep(seeded.uniform(0, 0.2))
        process.kill()
        process.wait()
        lines = log.read_text().splitlines()
        confirmed = max(confirmed, *(int(line) for line in lines[:-1]))
    with contextlib.closing(Database(path)) as database, database.read() as connection:
        count, last = connection.execute("SELECT COUNT(*), MAX(id) FROM work").fetchone()
    assert count == last >= confirmed > 10 * num_kills
