"""A disk that is full to the last byte under a master and a search: all wait for room, and nothing is lost."""

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
    """Run the program in a mount namespace, and return what it has found of each of two searches."""
    probed = tmp_path_factory.mktemp("probed")
    probe = f"mkdir {probed}/probe; mount -t tmpfs -o size=1m small {probed}/probe"
    in_namespace = unshare("--mount", probe=probe)
    # Determined's ranks meet at sockets in the temporary directory, whose paths have at most 107 characters.
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
        # Nobody was told that something is stored which is not.
        assert seen["lost"] == []
        assert seen["refusal"].startswith("503 ")
        assert "could not be written" in seen["status"]
        assert "Free some space" in seen["status"]
    # A master that was killed meanwhile does not start, and says why.
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
