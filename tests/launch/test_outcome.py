from __future__ import annotations

import json

import pytest

from dstrial.launch.failures import RankFailure
from dstrial.launch.outcome import LaunchOutcome

FAILURE = RankFailure(rank=1, local_rank=1, pid=7, exit_code=3, signal_name=None, host="here", error="é\nx")


@pytest.mark.parametrize(
    "outcome",
    [
        LaunchOutcome(0, None, (0, 0), None, ()),
        LaunchOutcome(3, FAILURE, (137, 3), "SIGTERM", (0,), ended_at_once=True),
    ],
)
def test_an_outcome_survives_its_file(outcome: LaunchOutcome) -> None:
    assert LaunchOutcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
