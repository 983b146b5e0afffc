"""Output of ``dstrial run`` for successful runs and for errors in user code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.testing.master import MasterForTest

DEADLINE_S = 240
HEAD = "Traceback (most recent call last):"

MODEL_DEF = """
import deepspeed
import torch
from torch import nn
from tqdm import tqdm

from dstrial import DataLoader, DeepSpeedTrial


class Records(torch.utils.data.Dataset):
    def __init__(self, is_broken):
        self.is_broken = is_broken

    def __len__(self):
        return 16

    def __getitem__(self, record_idx):
        if self.is_broken and record_idx == 3:
            raise KeyError(f"record {record_idx} has no label")
        return torch.ones(8), torch.ones(4)


class Good(DeepSpeedTrial):
    is_broken = False
    num_workers = 0

    def __init__(self, context):
        self.context = context
        self.read_table()
        model = nn.Sequential(nn.Linear(8, 4))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=context.get_deepspeed_config()
        )
        self.engine = context.wrap_model_engine(engine)

    def read_table(self):
        pass

    def mistake(self):
        pass

    def build_training_data_loader(self):
        return DataLoader(Records(self.is_broken), batch_size=4, num_workers=self.num_workers)

    def build_validation_data_loader(self):
        return DataLoader(Records(False), batch_size=4)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = next(dataloader_iter)
        if batch_idx == 1:
            self.mistake()
        loss = nn.functional.mse_loss(self.engine(features), targets)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = next(dataloader_iter)
        return {"validation_loss": nn.functional.mse_loss(self.engine(features), targets)}


class Watched(Good):
    def __init__(self, context):
        super().__init__(context)
        self.num_validations = 0
        for _ in tqdm(range(3), desc="reading the table"):
            pass

    def build_validation_data_loader(self):
        return DataLoader(Records(False), batch_size=16)

    def evaluate_batch(self, dataloader_iter, batch_idx):
        next(dataloader_iter)
        self.num_validations += 1
        # Validation runs every two batches; the second one is the best.
        return {"accuracy": [0.5, 0.9, 0.1, 0.2][self.num_validations - 1]}


class WrongShape(Good):
    def mistake(self):
        self.engine(torch.ones(4, 9))


class NoTable(Good):
    def read_table(self):
        open("/no/such/table.csv")


class BrokenRecord(Good):
    is_broken = True
    num_workers = 1
"""
BROKEN = "import os\nimport no_such_package\n\n\nclass MyTrial:\n    pass\n"
DS_CONFIG = """
{"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": true}}}
"""
CONFIG = """
name: mistakes
entrypoint: {entrypoint}
max_restarts: 0
hyperparameters: {{deepspeed_config: ds.json}}
resources: {{slots_per_trial: {slots}}}
searcher: {{name: single, metric: validation_loss, max_length: {{batches: {batches}}}}}
"""
WATCHED_CONFIG = """
name: screen
entrypoint: model_def:Watched
hyperparameters: {deepspeed_config: scheduled.json}
resources: {slots_per_trial: 1}
searcher: {name: single, metric: accuracy, smaller_is_better: false, max_length: {batches: 8}}
min_validation_period: {batches: 2}
min_checkpoint_period: {batches: 2}
# An unknown variable prevents a fork of the preloaded process: tqdm reads its variables at import.
environment: {environment_variables: [IMPORTS_ITSELF=1]}
"""
SCHEDULED = """
{"train_micro_batch_size_per_gpu": 4,
 "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": true}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}},
 "zero_optimization": {"stage": 1}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    context = tmp_path / "context"
    context.mkdir()
    (context / "model_def.py").write_text(MODEL_DEF)
    (context / "broken.py").write_text(BROKEN)
    (context / "ds.json").write_text(DS_CONFIG)
    return tmp_path


def write_config(project: Path, entrypoint: str, slots: int = 1, batches: int = 4) -> Path:
    path = project / "exp.yaml"
    path.write_text(CONFIG.format(entrypoint=entrypoint, slots=slots, batches=batches))
    return path


def run(
    project: Path, master: MasterForTest, entrypoint: str, slots: int = 1, batches: int = 4
) -> tuple[subprocess.CompletedProcess[str], RunDirectory]:
    words = ("run", str(write_config(project, entrypoint, slots, batches)), str(project / "context"))
    options = ("--runs-dir", str(project / "runs"), "--no-progress")
    ended = master.dstrial(*words, *options, cwd=project, deadline_s=DEADLINE_S)
    (record,) = (project / "runs").glob("*/*/run.json")
    return ended, RunDirectory(record.parent)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("entrypoint", "slots", "last", "places"),
    [
        pytest.param(
            "model_def:WrongShape",
            2,
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x9 and 8x4)",
            ["train_batch", "mistake"],
            id="on both ranks in train_batch",
        ),
        pytest.param(
            "model_def:NoTable",
            1,
            "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/table.csv'",
            ["__init__", "read_table"],
            id="a missing file in __init__",
        ),
        pytest.param(
            "model_def:BrokenRecord",
            1,
            "KeyError: 'record 3 has no label'",
            ["train_batch", "__getitem__"],
            id="in a worker of a loader",
        ),
        pytest.param(
            "broken:MyTrial",
            1,
            "ModuleNotFoundError: No module named 'no_such_package'",
            ["<module>"],
            id="while the model definition is imported",
        ),
    ],
)
def test_user_error_prints_single_traceback_of_user_frames(
    entrypoint: str, slots: int, last: str, places: list[str], project: Path, shared_master: MasterForTest
) -> None:
    ended, run_directory = run(project, shared_master, entrypoint, slots)
    assert ended.returncode == 1
    printed = ended.stdout + ended.stderr
    assert printed.count(HEAD) == 1, printed
    assert printed.count(last) == 1, printed
    assert ended.stderr.rstrip().endswith(last)
    record = run_directory.read_record()
    assert record.state is RunState.FAILED
    assert re.fullmatch(rf"rank \d failed first .*: {re.escape(last)}", str(record.failure))
    frames = [line.strip() for line in printed.splitlines() if line.startswith('  File "')]
    assert [frame.rpartition(", in ")[2] for frame in frames] == places
    module = entrypoint.partition(":")[0]
    assert all(frame.startswith(f'File "{module}.py", line ') for frame in frames), frames
    (whole,) = run_directory.path.glob("logs/attempt_1/rank_*/traceback.txt") if slots == 1 else [None]
    if whole is not None:
        assert f"whole traceback in {whole.relative_to(project)}" in printed
        assert "/dstrial/" in whole.read_text()
        assert last in whole.read_text()


@pytest.mark.ranks
def test_trial_log_has_single_traceback_and_exit_reason(project: Path, shared_master: MasterForTest) -> None:
    created = shared_master.det(
        *(
            "e",
            "create",
            str(write_config(project, "model_def:WrongShape", 2)),
            str(project / "context"),
            "-f",
        ),
        deadline_s=DEADLINE_S,
    )
    client = shared_master.client()
    newest = max(
        (
            row
            for row in client.get("/api/v1/experiments?limit=-1")["experiments"]
            if row["name"] == "mistakes"
        ),
        key=lambda row: row["id"],
    )
    (trial,) = client.get(f"/api/v1/experiments/{newest['id']}/trials")["trials"]
    text = shared_master.det("trial", "logs", str(trial["id"])).stdout
    assert text.count(HEAD) == 1, text + created.stdout
    assert "model_def.py" in text
    failed = [line for line in text.splitlines() if "container failed with non-zero exit code: 1" in line]
    assert len(failed) == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x9 and 8x4) (model_def.py:" in failed[0]
    assert failed[0].endswith(", in mistake)")
    (named,) = [line for line in text.splitlines() if "whole traceback in " in line]
    whole = Path(named.rpartition("whole traceback in ")[2].removesuffix(":"))
    assert "/site-packages/torch/nn/modules/linear.py" in whole.read_text()
    assert whole.stat().st_mode & 0o077 == 0
    deleted = shared_master.det("e", "delete", str(newest["id"]), "--yes")
    assert deleted.returncode == 0, deleted.stderr
    wait_for(lambda: not whole.exists(), f"{whole} outlives its experiment")


@pytest.mark.ranks
def test_run_hides_library_noise_and_names_best_checkpoint(
    project: Path, shared_master: MasterForTest
) -> None:
    (project / "context" / "scheduled.json").write_text(SCHEDULED)
    (project / "exp.yaml").write_text(WATCHED_CONFIG)
    found = shared_master.dstrial(
        "run", "exp.yaml", "context", "--no-progress", cwd=project, deadline_s=DEADLINE_S
    )
    assert found.returncode == 0, found.stdout + found.stderr
    (record,) = (project / "runs").glob("*/*/run.json")
    run_directory = RunDirectory(record.parent)
    for noise in ("validated ",):
        assert noise not in found.stdout + found.stderr
    text = found.stdout[found.stdout.index("state: ") :]
    assert str(run_directory.path) not in found.stdout
    assert text.count(run_directory.path.name) == 1
    wait_for(
        lambda: len(list_checkpoints(run_directory.checkpoints_path)) == 2, "the master has collected none"
    )
    by_batch = {
        stored.steps_completed: stored.path.name
        for stored in list_checkpoints(run_directory.checkpoints_path)
    }
    assert sorted(by_batch) == [4, 8], "the best and the last, as Determined keeps them"
    assert f"  best:        checkpoints/{by_batch[4]} (batch 4, accuracy 0.9)\n" in text
    assert run_directory.best_path.resolve() == run_directory.checkpoints_path.resolve() / by_batch[4]
    assert f"  last:        checkpoints/{by_batch[8]} (batch 8)\n" in text
