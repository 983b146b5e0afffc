"""Ended programs leave no files in /tmp and /dev/shm.

Each scenario has its own /tmp and /dev/shm in a mount namespace, so that files of other programs do not count.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("trace_scenarios.py")
MOUNT_POINT = "/mnt"
DEADLINE_S = 800

# $0 is the directory that becomes MOUNT_POINT; the rest is the command.
_SETUP = f"""
mount --bind "$0" {MOUNT_POINT} && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm || exit 77
exec "$@"
"""


def _unshared(directory: Path, *command: str) -> list[str]:
    as_root = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *as_root, "sh", "-c", _SETUP, str(directory), *command]


@functools.cache
def _has_namespaces() -> bool:
    if shutil.which("unshare") is None or not Path(MOUNT_POINT).is_dir():
        return False
    return subprocess.run(_unshared(Path("/"), "true"), capture_output=True, check=False).returncode == 0


def what_is_left(tmp_path: Path, scenario: str) -> dict[str, list[str]]:
    if not _has_namespaces():
        pytest.skip("Requires: [mount namespaces]")
    # Importing torch may have set the compiler's cache directories in /tmp for all child processes.
    ours = ("TMPDIR", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    ended = subprocess.run(
        _unshared(tmp_path, sys.executable, str(PROGRAM), scenario, MOUNT_POINT),
        env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    left: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return left


# Scenarios cannot see the machine's /tmp, therefore the skip.
@pytest.mark.exhaustive("[on_a_master]")
@pytest.mark.skipif(sys.executable.startswith("/tmp/"), reason="the environment lies below /tmp")
@pytest.mark.ranks
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("scenario", ["master_trials", "on_a_master", "launch"])
def test_scenario_leaves_no_files_in_tmp_and_shm(tmp_path: Path, scenario: str) -> None:
    left = what_is_left(tmp_path, scenario)

    assert left, "the scenario recorded no step"
    assert {name: entries for name, entries in left.items() if entries} == {}
