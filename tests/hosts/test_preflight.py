"""Host facts and ssh errors become problems with a remedy."""

from __future__ import annotations

import dataclasses
import fcntl
import platform
import shlex
import socket

import pytest

from dstrial.hosts import remote
from dstrial.hosts.hostfile import Host
from dstrial.hosts.preflight import Facts, address_of, fact_problems, named_interface
from dstrial.hosts.transport import SshTransport, remote_command, remote_environment

HERE = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "dstrial": "1.0"}
GOOD = Facts(
    python=platform.python_version(),
    versions=HERE,
    num_accelerators=0,
    addresses=(("eth0", "10.77.0.11"),),
    environment={},
)
HOSTS = (Host("host1", (0, 1)), Host("host2", (0, 1)))


def _problems(second: Facts) -> list[str]:
    found = fact_problems(HOSTS, [GOOD, second], HERE, environ={}, interface=None)
    return [f"{problem.host} is {problem.got}. {problem.fix}" for problem in found]


def _other(**changes: object) -> Facts:
    return dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]


def test_fact_problems_empty_for_equal_hosts() -> None:
    assert _problems(_other()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"python": "3.8.1"}, "host2 is Python 3.8.1; "),
        (
            {"versions": {**HERE, "torch": "2.12.0"}},
            "host2 is 2.12.0 of torch; 2.13.0+cpu here. Install torch==2.13.0",
        ),
        ({"versions": {**HERE, "dstrial": None}}, "host2 is without dstrial; 1.0 here."),
        ({"addresses": ()}, "host2 is without an IPv4 address but loopback."),
    ],
)
def test_fact_problems_name_host_and_remedy(changes: dict[str, object], told: str) -> None:
    (problem,) = _problems(_other(**changes))
    assert problem.startswith(told)


def test_fact_problems_check_accelerators_unless_cpu() -> None:
    hosts, facts = HOSTS, [dataclasses.replace(GOOD, num_accelerators=2), _other()]
    found = fact_problems(hosts, facts, HERE, environ={}, interface=None)
    assert [(problem.host, problem.got) for problem in found] == [
        ("host2", "without an accelerator, and other hosts have some")
    ]
    assert fact_problems(hosts, facts, HERE, environ={"DS_ACCELERATOR": "cpu"}, interface=None) == []
    facts[1] = dataclasses.replace(facts[1], num_accelerators=1)
    (problem,) = fact_problems(hosts, facts, HERE, environ={}, interface=None)
    assert "asked for slot(s) 1, and has 1 accelerator(s)" in problem.got
    assert fact_problems(hosts, facts, HERE, environ={"DSTRIAL_SHARE_DEVICE": "1"}, interface=None) == []


@pytest.mark.parametrize(
    ("environ", "named", "place"),
    [
        ({}, None, ("10.77.0.11", "eth0")),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0", ("10.1.0.2", "ib0")),
        ({"GLOO_SOCKET_IFNAME": "ib1"}, "ib1", ("10.77.0.11", "eth0")),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, None, ("10.77.0.11", "eth0")),
    ],
)
def test_named_interface_accepts_single_exact_name(
    environ: dict[str, str], named: str | None, place: tuple[str, str]
) -> None:
    facts = _other(addresses=(*GOOD.addresses, ("ib0", "10.1.0.2")))
    assert named_interface(environ) == named
    assert address_of(facts, named) == place


def test_addresses_sort_link_local_last(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"lo": "127.0.0.1", "usb0": "169.254.3.1", "eth0": "10.77.0.11"}
    names = iter(given)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(given, 1)))
    monkeypatch.setattr(
        fcntl, "ioctl", lambda *_: bytes(20) + socket.inet_aton(given[next(names)]) + bytes(232)
    )
    assert remote.addresses() == [["eth0", "10.77.0.11"], ["usb0", "169.254.3.1"]]


@pytest.mark.parametrize(
    ("code", "printed", "told"),
    [
        (255, "ssh: Could not resolve hostname h: Name or service not known", "unknown: no such name"),
        (255, "ssh: connect to host h port 22: Connection refused", "connection refused"),
        (255, "ssh: connect to host h port 22: Connection timed out", "unreachable"),
        (255, "root@h: Permission denied (publickey).", "permission denied"),
        (255, "Host key verification failed.", "not in ~/.ssh/known_hosts"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "has changed",
        ),
        (127, "bash: /p/python: No such file or directory", "without Python at /p/python"),
        (None, "", "silent (no answer within 5 s)"),
        (1, "what\nis this", "exit code 1): is this"),
    ],
)
def test_ssh_transport_explains_failures(code: int | None, printed: str, told: str) -> None:
    refusal = SshTransport().start_problem("h", "/p/python", code, printed)
    assert told in refusal.got
    assert refusal.fix.endswith(".")


def test_remote_environment_keeps_machine_variables() -> None:
    ours = {
        "HOME": "/here",
        "LINES": "a\nb",
        "RANK": "3",
        "SLURM_JOB_ID": "1",
        "NCCL_DEBUG": "INFO",
        "PATH": "/v/bin",
    }
    theirs = {"HOME": "/there", "PATH": "/bin", "SSH_CONNECTION": "x", "LANG": "C"}
    assert remote_environment(ours, theirs) == {
        "HOME": "/there", "LANG": "C", "LINES": "a\nb", "NCCL_DEBUG": "INFO", "PATH": "/v/bin",
    }  # fmt: skip


def test_remote_command_is_short_and_quotes_python() -> None:
    assert len(remote_command("/usr/bin/python3")) < 20_000
    words = shlex.split(remote_command("/my dir/python"))
    assert words[:3] == ["exec", "sh", "-c"]
    assert shlex.split(words[3])[:4] == ["/my dir/python", "-I", "-u", "-c"]
