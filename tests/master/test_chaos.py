"""A few runs of the chaos program; all of them are in its closing table."""

from __future__ import annotations

import chaos
import pytest


@pytest.mark.process
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_search_survives_what_is_killed(seed: int) -> None:
    outcome = chaos.run(seed)

    assert not outcome.problems, f"killed {outcome.killed}: {outcome.problems}"
