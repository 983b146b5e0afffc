"""Commands of launched ranks, number of slots, and recorded errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start

from dstrial.errors import LaunchError
from dstrial.launch.failures import read_record
from dstrial.launch.rank_main import script_command, trial_command
from dstrial.launch.slots import cluster_placement, threads_per_rank


def test_trial_command_has_absolute_paths_and_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = trial_command(
        "model_def:MyTrial",
        context_dir=Path("ctx"),
        config=Path("exp.yaml"),
        overrides=["a=--b"],
        run_dir=Path("runs/1"),
        resume="latest",
        test_mode=True,
    )
    assert command == [
        *(sys.executable, "-m", "dstrial.launch.rank_main", "--trial", "model_def:MyTrial"),
        *("--context-dir", str(tmp_path / "ctx"), "--config", str(tmp_path / "exp.yaml")),
        *("--override=a=--b", "--run-dir", str(tmp_path / "runs/1"), "--resume=latest", "--test"),
    ]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["train.py", "--lr", "1"], ["--script", "train.py", "--lr", "1"]),
        (["python3", "train.py"], ["--script", "train.py"]),
        (["-m", "pkg.train", "x"], ["--module", "pkg.train", "x"]),
        (["python", "-m", "pkg.train"], ["--module", "pkg.train"]),
    ],
)
def test_script_command_runs_python_in_rank_main(words: list[str], kind: list[str]) -> None:
    assert script_command(words) == [sys.executable, "-m", "dstrial.launch.rank_main", *kind]


def test_script_command_leaves_other_programs_unchanged() -> None:
    assert script_command(["bash", "run.sh", "x y"]) == ["bash", "run.sh", "x y"]
    assert script_command(["python3"]) == ["python3"]


def test_script_command_missing_python_file_is_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert script_command(["python3", "train.py"], directory=tmp_path)[-1] == "train.py"
    with pytest.raises(LaunchError, match=r"the script is 'nope\.py'; expected a Python file"):
        script_command(["python3", "nope.py"], directory=tmp_path)


OLD_NAMES_SCRIPT = """
import sys, warnings
import torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_gather_into_tensor(torch.zeros(1), torch.ones(1))
dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(1))
warnings.warn("something else is deprecated", FutureWarning)
dist.destroy_process_group()
"""


@pytest.mark.process
def test_only_torch_collective_deprecation_warnings_are_hidden(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OLD_NAMES_SCRIPT)
    command = script_command([str(script)])
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "something else is deprecated" in result.stderr
    assert "torch.distributed." not in result.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class MyTrial:\n    pass\nraise ValueError('bad model')\n", "ValueError: bad model"),
        (
            "from determined.pytorch.deepspeed import DeepSpeedTrial\nclass MyTrial(DeepSpeedTrial): pass\n",
            "Import DeepSpeedTrial from dstrial in trial_rank_def.",
        ),
    ],
)
def test_unusable_trial_prints_trial_import_error(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trial_rank_def.py").write_text(source)
    command = trial_command("trial_rank_def:MyTrial", context_dir=tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    result = warm_start.run_command(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "TrialImportError: --trial is 'trial_rank_def:MyTrial'" in result.stderr
    assert result.stderr.rstrip().endswith(message)
    assert "rank_main.py" not in result.stderr


@pytest.mark.process
def test_cluster_placement_uses_first_container_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import determined
    from determined import _info

    from dstrial.launch.local_ranks import Placement

    def info(addresses: list[str], rank: int) -> determined.ClusterInfo:
        return determined.ClusterInfo(
            master_url="http://localhost:8080",
            cluster_id="c",
            agent_id="a",
            slot_ids=[0, 1],
            task_id="t",
            allocation_id="t.1",
            session_token="s",
            task_type="TRIAL",
            rendezvous_info=_info.RendezvousInfo(addresses, rank, [2] * len(addresses)),
        )

    monkeypatch.setenv("C10D_PORT", "31234")
    assert cluster_placement(info(["10.0.0.1"], 0)) == Placement((2,))
    assert cluster_placement(info(["10.0.0.1", "10.0.0.2"], 1)) == Placement((2, 2), 1, "10.0.0.1", 31234)


@pytest.mark.process
@pytest.mark.parametrize("raised", ["raise ValueError(text)", "sys.exit(text)", "raise ConfigError([text])"])
def test_error_of_50_megabytes_is_truncated(raised: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom dstrial.errors import ConfigError\ntext = 'a' * 25_000_000 + 'é' * 25_000_000\n{raised}\n"
    )
    record, whole = tmp_path / "error.json", tmp_path / "whole.txt"
    variables = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(record), "DSTRIAL_TRACEBACK_FILE": str(whole)}

    command = [sys.executable, "-m", "dstrial.launch.rank_main", "--script", str(script)]
    ended = subprocess.run(command, env=variables, capture_output=True, timeout=60)

    assert ended.returncode == 1
    found = read_record(record)
    assert found is not None
    assert len(found.summary) < 2_200
    assert len(found.text) < 70_000
    assert re.search(r"a \[… 74,9\d\d,\d\d\d bytes are cut …\] é", found.text)
    assert not whole.exists() or whole.stat().st_size < 2**21
    assert "sys.exit" in raised or len(ended.stderr.decode()) < 70_000


@pytest.mark.parametrize(
    ("accelerator", "num_ranks", "expected"), [("cpu", 2, 1), ("cuda", 2, 8), ("cuda", 3, 5), ("cuda", 32, 1)]
)
def test_ranks_with_accelerators_share_cores(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, num_ranks: int, expected: int
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))

    assert threads_per_rank(num_ranks) == expected
