"""Tests start ranks, programs and masters as forks, which need not import torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm_start
from started_as import started_as

from dstrial.testing.master import MasterForTest
from dstrial.testing.ranks import run_function, run_script

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
EXPECTED = "a new process" if os.environ.get(warm_start.SWITCH) == "0" else "a fork"


def test_rank_helpers_start_ranks_as_forks() -> None:
    assert [one.value for one in run_function(started_as, 2)] == [EXPECTED] * 2
    assert [one.stdout.strip() for one in run_script(HERE / "started_as.py", 2)] == [EXPECTED] * 2


def test_warm_start_run_starts_fork() -> None:
    variables = {**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ended = warm_start.run(["started_as"], env=variables, cwd=HERE, timeout=60.0)
    assert (ended.returncode, ended.stdout.strip()) == (0, EXPECTED), ended.stderr


def test_shared_master_is_fork(shared_master: MasterForTest) -> None:
    is_fork = b"DSTRIAL_STATE_DIR=" not in Path(f"/proc/{shared_master.record.pid}/environ").read_bytes()
    assert is_fork == (EXPECTED == "a fork")


@pytest.mark.timeout(300)
def test_trial_of_shared_master_is_fork(tmp_path: Path, shared_master: MasterForTest) -> None:
    script = (HERE / "started_as.py").read_text(encoding="utf-8")
    (tmp_path / "started_as.py").write_text(script, encoding="utf-8")
    config = "name: fork\nentrypoint: python3 -m dstrial.launch started_as.py\nsearcher: {name: single, metric: x}\n"
    (tmp_path / "exp.yaml").write_text(config, encoding="utf-8")
    ended = shared_master.det("experiment", "create", "exp.yaml", ".", "--follow", cwd=tmp_path)
    assert f"|| {EXPECTED}\n" in ended.stdout, ended.stdout + ended.stderr
