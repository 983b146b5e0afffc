"""Interpretation of sbatch's messages, partly with a fake sbatch on PATH."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.errors import LaunchError
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
def test_is_refusal_excludes_temporary_rejections(code: int, said: str, *, expected: bool) -> None:
    assert is_refusal(code, said) == expected


def test_fix_for_full_queue_differs_from_job_limit() -> None:
    full, large = f"AssocMaxSubmitJobLimit\n{_POLICY}", f"QOSMaxCpuPerJobLimit\n{_POLICY}"
    assert (fix_for(full) or "").startswith("Wait until jobs of yours have ended")
    assert (fix_for(large) or "").startswith("Ask for less, or name another QOS or account")
    assert fix_for("anything else") is None


@pytest.mark.process
def test_submit_removes_sbatch_clusters_variable(
    fake_command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sbatch reads SBATCH_CLUSTERS; all Slurm commands read SLURM_CLUSTERS."""
    monkeypatch.setenv("SBATCH_CLUSTERS", "far")
    monkeypatch.setenv("SLURM_CLUSTERS", "near")
    fake_command("sbatch", 'echo "123;${SBATCH_CLUSTERS:-$SLURM_CLUSTERS}"; test -z "$SBATCH_CLUSTERS"')
    assert client.submit(Path("/x.sh")) == 123


@pytest.mark.process
def test_rejected_script_raises_error_with_fix(fake_command: Callable[[str, str], None]) -> None:
    said = "sbatch: error: allocation failure: Requested node configuration is not available"
    fake_command("sbatch", f"echo '{said}' >&2; exit 1")
    for ask in (client.submit, client.test):
        with pytest.raises(LaunchError, match="Ask for fewer slots") as raised:
            ask(Path("/x.sh"))
        assert not client.is_away(str(raised.value))
    found = client.rejection_of(Path("/x.sh"))
    assert found is not None
    assert found[0] == "sbatch says: allocation failure: Requested node configuration is not available"


def test_missing_slurm_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"sbatch, srun of Slurm is not on PATH; .* leave --slurm out"):
        client.require_slurm("sbatch", "srun")
