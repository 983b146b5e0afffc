"""Runs of the chaos program, which kills processes of small searches."""

from __future__ import annotations

import chaos
import pytest


@pytest.mark.exhaustive("[the master and a rank of a random search]")
@pytest.mark.process
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, id="the master and a rank of a random search"),
        pytest.param(6, id="an entrypoint and a rank of a halving search that end their trials"),
        pytest.param(8, id="the master and a supervisor of an adaptive search"),
    ],
)
def test_search_survives_killed_processes(seed: int) -> None:
    outcome = chaos.run(seed)

    assert not outcome.problems, f"killed {outcome.killed}: {outcome.problems}"
