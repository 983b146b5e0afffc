"""Long lists are made in the threads that read the database, and not in the event loop, which others wait for."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from seeded_cluster import add_task
from serving import Master

from dstrial.master.store.database import Transaction

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def threads_inside(function: str) -> set[str]:
    """Return the names of the threads that are in a function now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = set()
    for ident, frame in sys._current_frames().items():
        while frame is not None:
            if frame.f_code.co_name == function:
                found.add(names.get(ident, "unknown"))
            frame = frame.f_back
    return found


def who_makes(master: Master, path: str, function: str) -> set[str]:
    """Ask until somebody was seen in a function at twenty times, and return who was."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            assert master.get(path).status == 200

    asking = threading.Thread(target=ask)
    asking.start()
    found: set[str] = set()
    num_seen, give_up_at_s = 0, time.monotonic() + LIMIT_S
    try:
        while num_seen < 20:
            assert time.monotonic() < give_up_at_s, f"nobody is seen in {function}"
            seen = threads_inside(function)
            num_seen += bool(seen)
            found |= seen
            time.sleep(0.001)
    finally:
        is_over.set()
        asking.join()
    return found


def test_the_list_of_tasks_is_made_where_it_is_read(seeded_master: Master) -> None:
    def fill(tx: Transaction) -> None:
        for number in range(300):
            add_task(tx, name=f"task {number}", state="COMPLETED")

    seeded_master.services.database.write(fill)
    found = who_makes(seeded_master, "/page/tasks", "task_json")
    assert all(name.startswith("dstrial-reader") for name in found)
