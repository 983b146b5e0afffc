"""What is made of sbatch's answers, which a script of ours gives in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.errors import LaunchError, NodesUnknownError
from dstrial.slurm import client

pytestmark = pytest.mark.process


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return what puts a command of that name before Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        path.chmod(0o755)

    return write


def test_a_job_of_another_cluster_is_none_of_ours(
    command: Callable[[str, str], None], tmp_path: Path
) -> None:
    command("sbatch", "echo '123;far'")
    command("scancel", 'echo "$@" > cancelled')
    with pytest.raises(LaunchError, match=r"has given job 123 to cluster far; .* The job is cancelled\."):
        client.submit(Path("/x.sh"))
    assert (tmp_path / "cancelled").read_text() == "--clusters=far 123\n"
    command("scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="`scancel --clusters=far 123` ends the job") as raised:
        client.submit(Path("/x.sh"))
    assert not client.is_away(str(raised.value)), "it would be asked again"


def test_a_job_of_the_cluster_that_all_commands_mean_is_ours(
    command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("sbatch", "echo '123;near'")
    monkeypatch.setenv("SLURM_CLUSTERS", "near")
    assert client.submit(Path("/x.sh")) == 123


_NOT_AVAILABLE = "sbatch: error: allocation failure: Requested node configuration is not available"


def test_a_refusal_counts_where_all_nodes_have_registered(command: Callable[[str, str], None]) -> None:
    command("sinfo", "echo idle")
    command("sbatch", f"echo '{_NOT_AVAILABLE}' >&2; exit 1")
    with pytest.raises(LaunchError, match="Ask for fewer slots") as raised:
        client.submit(Path("/x.sh"))
    assert not client.is_transient(raised.value)
    with pytest.raises(LaunchError, match="Ask for fewer slots"):
        client.test(Path("/x.sh"))
    assert client.rejection_of(Path("/x.sh")) is not None


@pytest.mark.parametrize("nodes", ["echo idle; echo 'unknown*'", "echo 'Unable to contact' >&2; exit 1"])
def test_a_refusal_does_not_count_while_nodes_are_not_known(
    command: Callable[[str, str], None], nodes: str
) -> None:
    command("sbatch", f"echo '{_NOT_AVAILABLE}' >&2; exit 1")
    command("sinfo", nodes)
    with pytest.raises(NodesUnknownError, match=r"does not know all its nodes yet; .* Try again") as raised:
        client.submit(Path("/x.sh"))
    assert client.is_transient(raised.value)
    with pytest.raises(ConnectionError, match="its nodes are not known yet"):
        client.rejection_of(Path("/x.sh"))
