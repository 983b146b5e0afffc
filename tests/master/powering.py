"""Simulate a machine that loses power while it runs a search.

    unshare --pid --fork --mount-proc python powering.py WORK SEED

The program is the first process of a PID namespace, so that all its processes end with it. Each start is a boot with a new
boot id, in which the process ids that the master recorded belong to unrelated processes. The last line of the output is
JSON: the problems found after the end of the search.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import chaos
import chaos_checks
import chaos_train

from dstrial.master.state_directory import StateDirectory
from dstrial.testing.master import master_for_test

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def as_first_process(work: Path, seed: int) -> int:
    """Run the search in a child process and reap orphans, as init does."""
    machine = os.fork()
    if machine == 0:
        with contextlib.suppress(KeyboardInterrupt):
            run(work, seed)
        sys.stdout.flush()
        os._exit(0)
    while True:
        pid, status = os.wait()
        if pid == machine:
            return os.waitstatus_to_exitcode(status)


def run(work: Path, seed: int) -> None:
    """Start the master, submit the search unless it exists, and check its result."""
    mount_new_boot_id(work)
    state = StateDirectory(work / "state")
    lost = lost_runs(work, state)
    strangers = start_strangers_with_recorded_pids(state)
    env = {"TMPDIR": str(work / "tmp")}
    with master_for_test(work, num_slots=2 * chaos_train.NUM_RANKS, env=env) as master:
        with chaos_checks.opened(master) as connection:
            row = connection.execute("SELECT id FROM experiments").fetchone()
        experiment_id = row["id"] if row else chaos.submit(master, seed, work / "journals")
        chaos.wait(master, experiment_id)
        with chaos_checks.opened(master) as connection:
            _, problems = chaos_checks.look(master, connection, experiment_id, work / "journals", lost)
    dead = [stranger.pid for stranger in strangers if stranger.poll() is not None]
    for stranger in strangers:
        stranger.kill()
    found = {"problems": problems, "strangers": len(strangers), "dead strangers": dead}
    print(json.dumps(found))


def mount_new_boot_id(work: Path) -> None:
    """Mount a new boot id in this mount namespace."""
    path = work / "boot_id"
    path.write_text(f"{uuid.uuid4()}\n")
    subprocess.run(["mount", "--bind", str(path), BOOT_ID], check=True)


def lost_runs(work: Path, state: StateDirectory) -> set[tuple[int, int]]:
    """Return (trial id, run id) of runs that this or an earlier boot found running."""
    path = work / "lost.json"
    lost = json.loads(path.read_text()) if path.exists() else []
    lost += [[row["trial_id"], row["run_id"]] for row in running_allocations(state)]
    path.write_text(json.dumps(lost))
    return {(trial_id, run_id) for trial_id, run_id in lost}


def running_allocations(state: StateDirectory) -> list[sqlite3.Row]:
    """Return the allocations that the dead master left running."""
    if not state.database_path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{state.database_path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute("SELECT * FROM allocations WHERE state != 'TERMINATED'").fetchall()


def start_strangers_with_recorded_pids(state: StateDirectory) -> list[subprocess.Popen[bytes]]:
    """Start unrelated processes with the pids of the dead master and supervisors."""
    record = state.read_record()
    recorded = {row["supervisor_pid"] for row in running_allocations(state)} - {None}
    recorded |= set() if record is None else {record.pid}
    strangers = []
    for pid in sorted(recorded):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        strangers.append(subprocess.Popen(["sleep", "1000"]))
    assert [stranger.pid for stranger in strangers] == sorted(recorded)
    return strangers


if __name__ == "__main__":
    sys.exit(as_first_process(Path(sys.argv[1]), int(sys.argv[2])))
