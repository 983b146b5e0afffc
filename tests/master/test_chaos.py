"""Searches whose processes are killed end as undisturbed ones."""

from __future__ import annotations

import functools
from pathlib import Path

import chaos
import pytest
from waiting import wait_for

from dstrial.testing.master import master_for_test

CASES = {
    "the master and a rank": ("random", ["master", "rank"]),
    "an entrypoint and a supervisor": ("async_halving", ["entrypoint", "supervisor"]),
    "the master and all of its trials at once": ("adaptive_asha", ["all", "rank"]),
}


@pytest.mark.exhaustive("[the master and a rank]")
@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_search_survives_killed_processes(short_path: Path, case: str) -> None:
    searcher, targets = CASES[case]
    cut_off: set[tuple[int, int]] = set()
    # Start every program as a new process, not as a fork of the test suite's server.
    env = {"TMPDIR": str(short_path), "TEST_FORKS": "0"}
    with master_for_test(short_path, num_slots=4, env=env) as master:
        experiment_id = chaos.submit(master, searcher)
        for target in targets:
            before = chaos.num_reports(master)
            has_trained = functools.partial(lambda number: chaos.num_reports(master) >= number, before + 9)
            wait_for(lambda has_trained=has_trained: has_trained() and chaos.running(master), deadline_s=90)  # type: ignore[misc]
            if target in ("master", "all"):
                master.kill()
            if target != "master":
                cut_off |= chaos.kill(master, target)
            if target in ("master", "all"):
                master.up()
        chaos.wait(master, experiment_id)
        assert chaos.problems_of(master, experiment_id, cut_off) == []
