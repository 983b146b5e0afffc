"""A master and searches on a completely full disk: writers wait, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from namespaces import unshare

PROGRAM = Path(__file__).with_name("filling.py")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Observations of filling.py, run in a mount namespace, for each of two searches."""
    probed = tmp_path_factory.mktemp("probed")
    probe = f"mkdir {probed}/probe; mount -t tmpfs -o size=1m small {probed}/probe"
    in_namespace = unshare("--mount", probe=probe)
    # Determined's ranks connect through Unix sockets in the temporary directory; their paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="full-") as work:
        ended = subprocess.run(
            [*in_namespace, sys.executable, str(PROGRAM), work, "wait,kill", "down"],
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.process
def test_search_on_full_disk_waits_without_loss(
    filled: list[dict[str, Any]],
) -> None:
    found, _ = filled

    assert found["problems"] == []
    for seen in found["seen"]:
        # Everything that the master had confirmed is stored.
        assert seen["lost"] == []
        assert seen["refusal"].startswith("503 ")
        assert "could not be written" in seen["status"]
        assert "Free some space" in seen["status"]
    # A master that was killed cannot start again on the full disk; its error names the cause.
    killed = found["seen"][1]
    assert killed["code"] == 1
    assert "No space left on device" in killed["output"]


@pytest.mark.process
def test_down_on_full_disk_ends_all_processes(
    filled: list[dict[str, Any]],
) -> None:
    _, found = filled

    [seen] = found["seen"]
    assert (seen["code"], seen["living"], seen["lost"]) == (0, [], [])
    assert found["problems"] == []
    assert found["restarts"] == 0
