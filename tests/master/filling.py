"""Run searches on a small disk that is filled to the last byte.

    unshare --mount python filling.py WORK WAY,WAY... WAY...

Each argument after WORK is a search. For each of its ways, the program fills the disk while the search trains, then does
nothing (``wait``), kills and restarts the master (``kill``), or runs ``dstrial down --now`` (``down``), which loses lines
that had no room. Then it frees the disk.

The last line of the output is JSON: for each search, the observations and the problems found after its end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import chaos
import yaml
from submitting import config
from waiting import wait_for

from dstrial.errors import RequestError
from dstrial.master.client import Client
from dstrial.master.daemon import live_allocations
from dstrial.testing.master import MasterForTest, master_for_test

SIZE_MIB = 64
MAX_SUBMISSIONS = 2000


def main(work: Path, searches: list[str]) -> None:
    disk = work / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "small", str(disk)], check=True)
    (disk / "tmp").mkdir()
    with master_for_test(disk, num_slots=4, env={"TMPDIR": str(disk / "tmp")}) as master:
        found = [search_on_a_full_disk(master, work, ways.split(",")) for ways in searches]
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    print(json.dumps(found))


def search_on_a_full_disk(master: MasterForTest, work: Path, ways: list[str]) -> dict[str, object]:
    experiment_id = chaos.submit(master)
    seen = [during_a_full_disk(master, work / "disk" / "filler", way) for way in ways]
    chaos.wait(master, experiment_id)
    wait_for(lambda: database_row(master) == "")
    problems = chaos.problems_of(master, experiment_id, has_all_lines="down" not in ways)
    sql = "SELECT SUM(restarts) FROM trials WHERE experiment_id = ?"
    ((restarts,),) = chaos.rows(master, sql, experiment_id)
    return {"seen": seen, "problems": problems, "restarts": restarts}


def during_a_full_disk(master: MasterForTest, filler: Path, way: str) -> dict[str, object]:
    """Fill the disk during training, apply ``way`` to the master, and free the disk."""
    before = chaos.num_reports(master)
    wait_for(lambda: chaos.num_reports(master) >= before + 4, deadline_s=150)
    client = master.client()
    fill(filler)
    confirmed, refusal = submit_until_refused(client)
    status = database_row(master)
    seen: dict[str, object] = {"refusal": refusal, "status": status}
    if way == "wait":
        time.sleep(2.0)
    elif way == "kill":
        master.kill()
        ended = master.dstrial("up", *master.up_arguments, "--port", str(master.record.port))
        seen |= {"code": ended.returncode, "output": ended.stdout + ended.stderr}
    else:
        ended = master.dstrial("down", "--now")
        seen |= {"code": ended.returncode, "output": ended.stdout + ended.stderr}
        seen["living"] = live_allocations(master.state)
    filler.unlink()
    if way != "wait":
        master.up()
    stored = master.client().get("/api/v1/experiments?limit=-1")["experiments"]
    seen["lost"] = sorted(confirmed - {int(one["id"]) for one in stored})
    return seen


def submit_until_refused(client: Client) -> tuple[set[int], str]:
    """Submit paused experiments until one is refused; return the ids and the error."""
    confirmed: set[int] = set()
    body = {"config": yaml.safe_dump(config()), "modelDefinition": []}
    while len(confirmed) < MAX_SUBMISSIONS:
        try:
            confirmed.add(int(client.post("/api/v1/experiments", body)["experiment"]["id"]))
        except RequestError as error:
            return confirmed, f"{error.status} {error}"
    return confirmed, ""


def database_row(master: MasterForTest) -> str:
    """Return the database trouble that ``dstrial status`` reports."""
    return str(json.loads(master.dstrial("status", "--json").stdout)["trouble"])


def fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
