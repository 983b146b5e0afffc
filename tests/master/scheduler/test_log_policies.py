"""Which lines of a trial's output match a policy."""

from __future__ import annotations

from dstrial.master.scheduler.log_policies import compile_policies, matches


def test_policies_match_line_by_line() -> None:
    config = {
        "log_policies": [
            {"name": "oom", "pattern": ".*CUDA out of memory.*", "action": None},
            {"name": None, "pattern": "^fatal$", "action": {"type": "cancel_retries"}},
            {"name": "off", "pattern": None},
        ]
    }
    policies = compile_policies(config)

    assert [policy.name for policy in policies] == ["oom", None]
    assert [policy.action for policy in policies] == [None, "cancel_retries"]
    line = "RuntimeError: CUDA out of memory. Tried"
    assert matches(policies, ["fine\n", f"{line}\n"]) == [(policies[0], line)]
    assert matches(policies, ["not fatal\n"]) == []
    assert matches(policies, ["x\nfatal\ny\n"]) == [(policies[1], "fatal")]
    assert matches(policies, ["fatal\n", "x\n"]) == [(policies[1], "fatal")]
