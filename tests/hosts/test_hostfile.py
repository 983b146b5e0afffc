"""Read hostfiles and filters as DeepSpeed does, and report all errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.errors import ConfigError
from dstrial.hosts.hostfile import Host, given_slots, read_hosts


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nhost1 slots=2\n\nhost2 slots=4  # the big one\n10.0.0.3   slots=1\n")
    return path


def _slots(hosts: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in hosts}


def _problems(path: Path, **filters: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_hosts(path, **filters)  # type: ignore[arg-type]
    return [str(problem) for problem in raised.value.problems]


def test_read_hosts_parses_lines_comments_and_addresses(hostfile: Path) -> None:
    assert _slots(read_hosts(hostfile)) == {"host1": (0, 1), "host2": (0, 1, 2, 3), "10.0.0.3": (0,)}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("host2", "", {"host2": (0, 1, 2, 3)}),
        ("host2:0,2@host1", "", {"host1": (0, 1), "host2": (0, 2)}),
        ("", "host2", {"host1": (0, 1), "10.0.0.3": (0,)}),
        ("", "host2:0@host1:0,1", {"host2": (1, 2, 3), "10.0.0.3": (0,)}),
    ],
)
def test_read_hosts_applies_include_and_exclude(
    hostfile: Path, include: str, exclude: str, expected: dict[str, tuple[int, ...]]
) -> None:
    hosts = read_hosts(hostfile, include=include, exclude=exclude)
    assert _slots(hosts) == expected
    assert all(
        host.is_filtered == (len(host.slots) < {"host1": 2, "host2": 4, "10.0.0.3": 1}[host.name])
        for host in hosts
    )


def test_read_hosts_filters_match_deepspeed(hostfile: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    for include, exclude in (("host2:0,2@host1", ""), ("", "host2:0@host1"), ("10.0.0.3", "")):
        theirs = parse_inclusion_exclusion(fetch_hostfile(str(hostfile)), include, exclude)
        ours = read_hosts(hostfile, include=include, exclude=exclude)
        assert _slots(ours) == {name: tuple(slots) for name, slots in theirs.items()}


def test_read_hosts_missing_file_is_error(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path / "hots")
    assert "cannot be read (No such file or directory)" in problem
    assert str(Path.cwd()) in problem


def test_read_hosts_reports_all_invalid_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "host1 slots=2\nhost1 slots=1\nhost2\n-oProxyCommand=x slots=1\nhost3 slots=0\nhost4 slots=x\n"
    )
    problems = _problems(path)
    assert [problem.partition(" is ")[0].rpartition(":")[2] for problem in problems] == [
        "2",
        "3",
        "4",
        "5",
        "6",
    ]
    assert "'host1' once more" in problems[0]


@pytest.mark.parametrize(
    ("filters", "named"),
    [
        ({"include": "host5@host1:7"}, ["'host5' is not in", "slots 0 to 1 of host1"]),
        ({"include": "host1", "exclude": "host2"}, ["one of the two"]),
        ({"exclude": "host1@host2@10.0.0.3"}, ["at least one host that is left"]),
        ({"include": "host1:"}, ["slots 0 to 1 of host1"]),
    ],
)
def test_read_hosts_rejects_invalid_filters(
    hostfile: Path, filters: dict[str, str], named: list[str]
) -> None:
    problems = _problems(hostfile, **filters)
    assert len(problems) == len(named)
    assert all(word in problem for word, problem in zip(named, problems, strict=True))


def test_given_slots_ignores_default_slots_per_trial(tmp_path: Path) -> None:
    config = tmp_path / "exp.yaml"
    config.write_text("resources: {slots_per_trial: 4}")
    assert given_slots(config) == 4
    assert given_slots(config, ["resources.slots_per_trial=2", "name=x"]) == 2
    config.write_text("resources: {priority: 4}")
    assert given_slots(config) is None
    config.write_text("name: x")
    assert given_slots(config) is None
