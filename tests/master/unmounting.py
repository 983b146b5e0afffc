"""Unmount and remount a checkpoint storage under a master, in a mount namespace.

    python unmounting.py WORK

Requires permission to mount. The last line of the output is JSON with the observations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from submitting import log_of, submit, trials, wait_until
from test_storage_gone import SAVING, between_saves, checkpoints, lost, saving
from waiting import wait_for

from dstrial.testing.master import master_for_test


def main(work: Path) -> None:
    disk, storage = work / "disk", work / "nfs"
    disk.mkdir()
    storage.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(storage)], check=True)
    with master_for_test(work, num_slots=1) as master:
        experiment_id = submit(master, saving(work, storage), SAVING)
        wait_for(lambda: len(checkpoints(master, experiment_id)) >= 5)
        with between_saves(work):
            subprocess.run(["umount", "--lazy", str(storage)], check=True)
        wait_for(lambda: "waiting for its checkpoint storage" in log_of(master, experiment_id))
        made = [path.name for path in storage.iterdir()]

        before = len(checkpoints(master, experiment_id))
        subprocess.run(["mount", "--bind", str(disk), str(storage)], check=True)
        wait_for(lambda: len(checkpoints(master, experiment_id)) >= before + 3)
        (work / "last").touch()
        wait_until(master, experiment_id, "COMPLETED")
        [trial] = trials(master, experiment_id)
        found = {
            "made in the mount point": made,
            "lost": lost(master, experiment_id, storage),
            "restarts": int(trial["restarts"]),
            "log": log_of(master, experiment_id),
        }
    subprocess.run(["umount", "--lazy", str(storage)], check=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
