"""A machine that runs a search: the first process of a PID namespace, with which all others end.

    unshare --pid --fork --mount-proc python powering.py WORK SEED

Every start is another start of the machine (another boot id), in which all process ids that the master has noted belong
to somebody else. The last line of the output is JSON: what is wrong when the search has ended.
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
    """Run the machine in a child and wait for every orphan, as an init does."""
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
    """Start the master, submit the search unless it is there, and look at it when it has ended."""
    start_another_time(work)
    state = StateDirectory(work / "state")
    lost = runs_that_went_with_the_power(work, state)
    strangers = strangers_with_the_noted_ids(state)
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


def start_another_time(work: Path) -> None:
    """Show another boot id in this mount namespace."""
    path = work / "boot_id"
    path.write_text(f"{uuid.uuid4()}\n")
    subprocess.run(["mount", "--bind", str(path), BOOT_ID], check=True)


def runs_that_went_with_the_power(work: Path, state: StateDirectory) -> set[tuple[int, int]]:
    """Return (trial id, run id) of all runs that a start of the machine has found unended."""
    path = work / "lost.json"
    lost = json.loads(path.read_text()) if path.exists() else []
    lost += [[row["trial_id"], row["run_id"]] for row in unended(state)]
    path.write_text(json.dumps(lost))
    return {(trial_id, run_id) for trial_id, run_id in lost}


def unended(state: StateDirectory) -> list[sqlite3.Row]:
    """Return the allocations that the dead master has left."""
    if not state.database_path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{state.database_path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute("SELECT * FROM allocations WHERE state != 'TERMINATED'").fetchall()


def strangers_with_the_noted_ids(state: StateDirectory) -> list[subprocess.Popen[bytes]]:
    """Start processes that have the ids of the dead master and of the dead supervisors."""
    record = state.read_record()
    noted = {row["supervisor_pid"] for row in unended(state)} - {None}
    noted |= set() if record is None else {record.pid}
    strangers = []
    for pid in sorted(noted):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        strangers.append(subprocess.Popen(["sleep", "1000"]))
    assert [stranger.pid for stranger in strangers] == sorted(noted)
    return strangers


if __name__ == "__main__":
    sys.exit(as_first_process(Path(sys.argv[1]), int(sys.argv[2])))
