"""Expansion of Slurm's node lists and counts; tests/hosts compares with scontrol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.slurm.allocation import expand_counts, expand_nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("host1", ["host1"]),
        ("host[1-3]", ["host1", "host2", "host3"]),
        ("host[1,3]", ["host1", "host3"]),
        ("gpu[01-03,7]-ib,login", ["gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu7-ib", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
        ("a.b-c_d,e[5]", ["a.b-c_d", "e5"]),
        ("", []),
    ],
)
def test_expand_nodes_follows_slurm_syntax(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text", ["host[1-", "host]1[", "a,,b", "host[3-1]", "host[a-b]", "host[]", "h[1-99999999]", ",a"]
)
def test_expand_nodes_rejects_malformed_lists(text: str) -> None:
    with pytest.raises(ValueError, match="no list of Slurm's nodes"):
        expand_nodes(text)


@given(st.lists(st.integers(1, 9), max_size=8))
def test_expand_counts_round_trips(counts: list[int]) -> None:
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == counts


def test_expand_counts_of_malformed_text_is_empty() -> None:
    assert expand_counts("four") == expand_counts("4(x)") == []
