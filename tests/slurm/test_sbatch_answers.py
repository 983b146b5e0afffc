"""What sbatch's answers mean: as text, and as given by a script in the place of sbatch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.errors import LaunchError, NodesUnknownError
from dstrial.slurm import client
from dstrial.slurm.client import fix_for, is_refusal

_POLICY = "allocation failure: Job violates accounting/QOS policy"


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "sbatch: Job 1 to start at 2026-11-25T19:54:11 using 1 processors on nodes host1", False),
        (1, "sbatch: error: invalid partition specified: nope", True),
        (1, "allocation failure: Requested node configuration is not available", True),
        (0, "allocation failure: Requested node configuration is not available", True),
        (255, "sbatch: unrecognized option '--frobnicate'", True),
        (1, "allocation failure: Required partition not available (inactive or drain)", False),
        (1, "allocation failure: Required node not available (down, drained or reserved)", False),
        (1, f"{_POLICY} (job submit limit)", False),
        (1, f"sbatch: error: AssocMaxSubmitJobLimit\n{_POLICY}", False),
        (1, f"sbatch: error: QOSGrpSubmitJobsLimit\n{_POLICY}", False),
        (1, f"sbatch: error: QOSMaxCpuPerJobLimit\n{_POLICY}", True),
        (1, f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{_POLICY} (and so on)", True),
    ],
)
def test_what_may_be_otherwise_later_is_no_refusal(code: int, said: str, *, expected: bool) -> None:
    assert is_refusal(code, said) == expected


def test_fix_for_full_queue_differs_from_job_limit() -> None:
    full, large = f"AssocMaxSubmitJobLimit\n{_POLICY}", f"QOSMaxCpuPerJobLimit\n{_POLICY}"
    assert (fix_for(full) or "").startswith("Wait until jobs of yours have ended")
    assert (fix_for(large) or "").startswith("Ask for less, or name another QOS or account")
    assert fix_for("anything else") is None


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


@pytest.mark.process
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


@pytest.mark.process
def test_a_job_of_the_cluster_that_all_commands_mean_is_ours(
    command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("sbatch", "echo '123;near'")
    monkeypatch.setenv("SLURM_CLUSTERS", "near")
    assert client.submit(Path("/x.sh")) == 123


_NOT_AVAILABLE = "sbatch: error: allocation failure: Requested node configuration is not available"


@pytest.mark.process
def test_a_refusal_counts_where_all_nodes_have_registered(command: Callable[[str, str], None]) -> None:
    command("sinfo", "echo idle")
    command("sbatch", f"echo '{_NOT_AVAILABLE}' >&2; exit 1")
    with pytest.raises(LaunchError, match="Ask for fewer slots") as raised:
        client.submit(Path("/x.sh"))
    assert not client.is_transient(raised.value)
    with pytest.raises(LaunchError, match="Ask for fewer slots"):
        client.test(Path("/x.sh"))
    assert client.rejection_of(Path("/x.sh")) is not None


@pytest.mark.process
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
