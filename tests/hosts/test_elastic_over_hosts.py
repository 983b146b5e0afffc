"""A trial over hosts that are drained, cut off and healed trains on with what is left, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_run import NUM_HOSTS, ElasticRun
from machines import machines

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


def test_a_trial_follows_hosts_that_are_drained_cut_off_and_healed(tmp_path: Path) -> None:
    with machines(NUM_HOSTS + 1) as made:
        run = ElasticRun(made, tmp_path, num_batches=80)
        run.up()
        alone = run.alone()
        run.begin(min_slots=1, resize_period=10)
        master, last = run.master, made[NUM_HOSTS]
        run.do("host5 is drained", lambda: master.det("agent", "disable", "host5", "--drain"), 3)
        run.do("host4's cable is cut", last.cut, 2)
        run.do("its cable is healed", last.heal, 3)
        outcome = run.end()
        master.down("--now")

    assert outcome.reported == tuple(range(1, 81)), "each batch counts once"
    assert [(one.before, one.after) for one in outcome.changes] == [(4, 3), (3, 2), (2, 3)]
    assert outcome.changes[0].again == 0, "it has saved before it left"
    assert outcome.changes[2].again == 0
    assert outcome.changes[1].again <= 5, "what no checkpoint had"
    assert outcome.losses == pytest.approx(alone, rel=1e-3)
    assert "host4 (rank" in outcome.log
    assert "it grows from 2 to 3 slots" in outcome.log
