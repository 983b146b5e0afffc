"""Forged messages between ranks are rejected before they are decoded."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dstrial.errors import RankError
from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.process

LONG = 100_000


class Payload:
    """Creates a file in the process that unpickles it."""

    def __init__(self, path: str, size: int = 0) -> None:
        self.path = path
        self.filling = "x" * size

    def __reduce__(self) -> Any:
        return _write, (self.path, self.filling)


def _write(path: str, _filling: str) -> None:
    Path(path).touch()


def forge(operation: str, forger: int, path: str, size: int) -> str:
    import torch.distributed

    from dstrial.errors import RankError
    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    torch.distributed.init_process_group("gloo")
    channel = ControlChannel(identify(os.environ), timeout_s=30)
    value: Any = channel.rank
    if channel.rank == forger:
        # Simulates another program on the connections of this rank: only the secret differs.
        lane: Any = channel._group_channel
        lane.key = b"a guess"
        value = Payload(path, size)
    try:
        getattr(channel, operation)(value)
    except RankError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("size", [0, LONG])
@pytest.mark.parametrize(("operation", "forger"), [("allgather", 1), ("gather", 1), ("broadcast", 0)])
def test_message_with_wrong_tag_is_rejected_undecoded(
    operation: str, forger: int, size: int, tmp_path: Path
) -> None:
    results = run_function(forge, 2, operation, forger, str(tmp_path / "owned"), size, check=False)

    assert not (tmp_path / "owned").exists()
    told = results[1 - forger].value
    assert f"the message of rank {forger} in {operation}" in told
    assert "does not carry this job's tag" in told


def differ() -> tuple[str, list[str]]:
    import torch.distributed

    from dstrial.errors import RankError
    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    os.environ["DSTRIAL_SECRET"] = f"of rank {os.environ['RANK']}"
    torch.distributed.init_process_group("gloo")
    try:
        ControlChannel(identify(os.environ), timeout_s=30)
    except RankError as error:
        return str(error), []
    return "", []


def test_ranks_with_different_secrets_fail_at_start() -> None:
    results = run_function(differ, 2)
    for result in results:
        assert f"the message of rank {1 - result.rank} in start of the control channel" in result.value[0]
        assert "Give all ranks the same DSTRIAL_SECRET" in result.value[0]


def meet_without_secret() -> tuple[list[int], bool]:
    import torch.distributed

    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    for name in ("DSTRIAL_SECRET", "DET_SESSION_TOKEN"):
        os.environ.pop(name, None)
    torch.distributed.init_process_group("gloo")
    channel = ControlChannel(identify(os.environ), timeout_s=30)
    lane: Any = channel._group_channel
    return channel.allgather(channel.rank), len(lane.key) == 32


def test_ranks_without_secret_share_key_and_remove_file(tmp_path: Path) -> None:
    results = run_function(meet_without_secret, 2, env={"TMPDIR": str(tmp_path)})
    assert [result.value for result in results] == [([0, 1], True)] * 2
    assert [path for path in tmp_path.iterdir() if path.name.startswith("dstrial-key")] == []


class Store(dict[str, bytes]):
    """A stand-in for an open store into which another account has written."""


def test_untrusted_key_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrial.ranks.job_secret import key_through_file

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    good = tmp_path / "dstrial-key-good"
    good.write_bytes(b"k" * 32)
    good.chmod(stat.S_IRUSR | stat.S_IWUSR)
    with key_through_file(Store(key=good.name.encode()), is_writer=False) as key:
        assert key == b"k" * 32

    for_others = tmp_path / "dstrial-key-open"
    for_others.write_bytes(b"k" * 32)
    for_others.chmod(0o644)
    link = tmp_path / "dstrial-key-link"
    link.symlink_to(good)
    short = tmp_path / "dstrial-key-short"
    short.write_bytes(b"")
    short.chmod(0o600)
    linked = tmp_path / "dstrial-key-linked"
    os.link(short, linked)
    for name in (
        for_others.name,
        link.name,
        short.name,
        linked.name,
        "dstrial-key-missing",
        "../../etc/passwd",
    ):
        with (
            pytest.raises(RankError, match="Set DSTRIAL_SECRET"),
            key_through_file(Store(key=name.encode()), is_writer=False),
        ):
            pass
    if os.geteuid() == 0:
        os.chown(good, 65534, 65534)
        with (
            pytest.raises(RankError, match="has another owner"),
            key_through_file(Store(key=good.name.encode()), is_writer=False),
        ):
            pass
