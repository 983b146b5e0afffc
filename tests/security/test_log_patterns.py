"""Patterns of log policies cannot stop the master, which searches them in every line of a trial."""

import subprocess
import sys
import time

import pytest
import yaml

from dstrial.config.schema import compile_pattern
from dstrial.testing.master import MasterForTest

PATTERN = "(a+)+$"
LINE = "a" * 60 + "!"

SEARCH = """\
from dstrial.master.scheduler.reconciler import compile_policies, matches
policies = compile_policies({"log_policies": [{"pattern": %r}]})
assert len(policies) == 1
assert matches(policies, [%r, "fine"]) == []
assert matches(policies, ["xaaa"]) == [(policies[0], "xaaa")]
"""


@pytest.mark.process
def test_a_search_that_would_backtrack_for_ever_ends():
    subprocess.run([sys.executable, "-c", SEARCH % (PATTERN, LINE)], check=True, timeout=60)


@pytest.mark.process
def test_a_master_goes_on_with_a_trial_whose_policy_would_backtrack_for_ever(shared_master: MasterForTest):
    given = {
        "name": "patterns",
        "entrypoint": f"echo '{LINE}'; echo xaaa; exit 1",
        "searcher": {"name": "single", "metric": "loss"},
        "max_restarts": 3,
        "log_policies": [{"pattern": PATTERN, "action": "cancel_retries"}],
    }
    client = shared_master.client()
    body = {"activate": True, "config": yaml.safe_dump(given), "modelDefinition": []}
    experiment_id = client.post("/api/v1/experiments", body)["experiment"]["id"]

    give_up_at_s = time.monotonic() + 60
    while (
        state := client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"]
    ) != "STATE_ERROR":
        assert time.monotonic() < give_up_at_s, state
        time.sleep(0.1)


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "a{2000}", "(", "\ud800"])
def test_what_re2_does_not_read_is_no_pattern(pattern):
    with pytest.raises(ValueError, match=r"."):
        compile_pattern(pattern)
