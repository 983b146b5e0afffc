"""``det experiment continue`` reruns the failed trials of a search."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitting import TRAIN, config, submit, trials, wait_until

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process


@pytest.mark.parametrize("searcher", [{"name": "grid"}, {"name": "random", "max_trials": 2}], ids=str)
def test_continue_reruns_failed_trials_of_search(
    shared_master: MasterForTest, tmp_path: Path, searcher: dict[str, object]
) -> None:
    marker = tmp_path / "repaired"
    script = f"import pathlib, sys\nif not pathlib.Path({str(marker)!r}).exists(): sys.exit(3)\n{TRAIN}"
    given = config(
        hyperparameters={"lr": {"type": "categorical", "vals": [0.1, 0.2]}, "steps": 2},
        searcher={"metric": "score", **searcher},
    )
    experiment_id = submit(shared_master, given, script)
    wait_until(shared_master, experiment_id, "ERROR")
    marker.touch()

    done = shared_master.det("experiment", "continue", str(experiment_id))

    assert done.returncode == 0, done.stderr
    wait_until(shared_master, experiment_id, "COMPLETED")
    assert [trial["state"] for trial in trials(shared_master, experiment_id)] == ["STATE_COMPLETED"] * 2
