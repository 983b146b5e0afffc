"""Log policies: a slow or unsupported pattern cannot block the master."""

import subprocess
import sys

import pytest

from dstrial.config.schema import compile_pattern

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
def test_catastrophic_backtracking_pattern_terminates():
    subprocess.run([sys.executable, "-c", SEARCH % (PATTERN, LINE)], check=True, timeout=60)


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "a{2000}", "(", "\ud800"])
def test_patterns_unsupported_by_re2_are_rejected(pattern):
    with pytest.raises(ValueError, match=r"."):
        compile_pattern(pattern)
