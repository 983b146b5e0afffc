"""``Reporter`` loops: training, stop, resume on other ranks, and rejected misuse."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import DEADLINE_S, Launched, launch

from dstrial.cli.app import main as dstrial
from dstrial.errors import CheckpointError
from dstrial.integrations.accelerate.progress_tracker import ProgressTracker, RunSchedule
from dstrial.testing.master import MasterForTest
from dstrial.testing.ranks import run_script

PROGRAM = Path(__file__).with_name("reporter_program.py")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate, transformers]"
    ),
]

CONFIG: dict[str, Any] = {
    "name": "reporter",
    "entrypoint": "python3 -m dstrial.launch reporter_program.py",
    "hyperparameters": {
        "deepspeed_config": {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3},
        },
        "lr": 0.01,
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 9}},
    "scheduling_unit": 1,
    "min_validation_period": {"batches": 3},
    "min_checkpoint_period": {"batches": 4},
    "checkpoint_policy": "none",
}

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """An uninterrupted run: two ranks, ZeRO 3, 9 batches, a checkpoint after batch 4."""
    return launch(tmp_path_factory.mktemp("whole"), PROGRAM, CONFIG)


@pytest.fixture(scope="module")
def resumed(whole: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run ``whole`` resumed from batch 4 on one rank, with a stop request in batch 7."""
    directory = tmp_path_factory.mktemp("resumed")
    run = shutil.copytree(whole.run, directory / "run")
    env = {"DSTRIAL_RUN_DIR": str(run), "DSTRIAL_RESUME": str(whole.checkpoints[4])}
    return launch(directory, PROGRAM, CONFIG, "--stop-at", "6", slots=1, run=run, **env)


def test_reporter_trains_all_ranks_with_deepspeed(whole: Launched) -> None:
    assert whole.output.count("ranks=2 kind=DEEPSPEED") == 2
    assert whole.output.count("stopped=None at 9 of 9") == 2
    assert list(whole.rows("training")) == list(range(1, 10))
    assert list(whole.rows("validation")) == [3, 6, 9]
    assert sorted(whole.checkpoints) == [4, 8, 9]
    assert json.loads((whole.run / "run.json").read_text())["state"] == "completed"
    # Accelerate's automatic checkpoint naming would write here.
    assert not (whole.run.parents[2] / "checkpoints").exists()


def test_resume_rejects_changed_epoch_length(whole: Launched) -> None:
    saved = torch.load(whole.checkpoints[4] / "dstrial_rank1.pt", weights_only=False)
    assert saved["loop"]["epoch_length"] == 6
    tracker = ProgressTracker()
    plan = RunSchedule.from_config(CONFIG, global_batch_size=8, length=None, is_test=False)
    tracker.begin(plan, saved["loop"]["epoch_length"])
    tracker.epoch_length = 6
    with pytest.raises(CheckpointError, match="epochs of 6 batches, and the training loader now has 5"):
        tracker.epoch_length = 5


def test_checkpoint_is_sharded_and_exportable(whole: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    path = whole.checkpoints[4]
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert {f"pytorch_model/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)} <= names
    assert {"custom_checkpoint_0.pkl", "scheduler.bin", "manifest.json", "dstrial_rank1.pt"} <= names
    assert dstrial(["checkpoint", "verify", str(path)]) == 0
    assert dstrial(["checkpoint", "inspect", str(path)]) == 0
    assert "zero_stage: 3" in capsys.readouterr().out
    target = whole.run / "model.safetensors"
    assert dstrial(["checkpoint", "export", str(path), str(target), "--format", "safetensors"]) == 0
    assert target.stat().st_size > 0


def test_resume_two_ranks_on_single_rank_keeps_losses(whole: Launched, resumed: Launched) -> None:
    assert "ranks=1 kind=DEEPSPEED" in resumed.output
    before, after = whole.values("training", "loss"), resumed.values("training", "loss")
    assert list(after) == list(range(1, 8))
    assert after == pytest.approx({batch: before[batch] for batch in after}, rel=1e-6)
    # The scheduler and the custom object are restored, too.
    assert resumed.values("validation", "records") == {3: 24, 6: 48}
    rates = resumed.values("validation", "rate")
    assert rates == pytest.approx({batch: 0.01 / (1 + 0.1 * batch) for batch in (3, 6)})


def test_stop_signal_ends_training_with_checkpoint(resumed: Launched) -> None:
    assert "stopped=StopReason.SIGNAL at 7 of 9" in resumed.output
    assert max(resumed.checkpoints) == 9  # from the copied run, beside the new checkpoint of batch 7
    assert 7 in resumed.checkpoints


def test_step_before_resume_error_contains_fix(resumed: Launched) -> None:
    assert "before resume(): reporter.step() is called before reporter.resume()" in resumed.output
    assert "Add reporter.resume() after accelerator.prepare(...)" in resumed.output


def test_accumulating_loop_without_accumulate_is_rejected(whole: Launched, tmp_path: Path) -> None:
    """On one rank a batch is two micro batches, which would be two optimizer steps."""
    run = shutil.copytree(whole.run, tmp_path / "run")
    env = {"DSTRIAL_RUN_DIR": str(run), "DSTRIAL_RESUME": str(whole.checkpoints[4])}
    refused = launch(tmp_path, PROGRAM, CONFIG, "--without-accumulate", slots=1, run=run, exit_code=1, **env)
    assert "the loop does not call accelerator.accumulate, and a batch has 2 micro batches" in refused.output


def test_ranks_unknown_to_accelerate_are_rejected() -> None:
    # As under torchrun on CPUs: dstrial.launch, which sets the backend, is not used. The store is in this process, as in
    # torchrun; a store in rank 0 would end while rank 1 may still read it.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_launcher = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_script(PROGRAM, 2, check=False, env=of_launcher)
    for result in results:
        assert result.exit_code != 0
        if importlib.metadata.version("accelerate").startswith("1.15."):
            assert "accelerator.num_processes is 1; expected 2, the ranks that were launched" in result.stderr
        else:  # other releases find the ranks, but do not use DeepSpeed
            assert "expected 2, the ranks" in result.stderr or "expected DEEPSPEED" in result.stderr


def run_under_a_master(
    master: MasterForTest, directory: Path, *options: str, **changes: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], list[dict[str, Any]]]:
    """Run the program as a one-slot experiment; return result, experiment and trials."""
    definition = directory / "definition"
    definition.mkdir()
    shutil.copy(PROGRAM, definition)
    values = {**CONFIG, "resources": {"slots_per_trial": 1}, "max_restarts": 0, **changes}
    values["entrypoint"] = " ".join((CONFIG["entrypoint"], *options))
    (directory / "experiment.yaml").write_text(yaml.safe_dump(values))
    words = ("run", str(directory / "experiment.yaml"), str(definition))
    ended = master.dstrial(*words, "--runs-dir", str(directory / "runs"), deadline_s=DEADLINE_S)
    client = master.client()
    newest = "/api/v1/experiments?sortBy=SORT_BY_ID&orderBy=ORDER_BY_DESC&limit=1"
    (experiment,) = client.get(newest)["experiments"]
    trials: list[dict[str, Any]] = client.get(f"/api/v1/experiments/{experiment['id']}/trials")["trials"]
    return ended, experiment, sorted(trials, key=lambda trial: trial["id"])


def test_reporter_without_deepspeed_is_rejected(shared_master: MasterForTest, tmp_path: Path) -> None:
    ended, experiment, trials = run_under_a_master(shared_master, tmp_path, "--without-deepspeed")

    printed = ended.stdout + ended.stderr
    # The type is NO; with accelerate 1.11 MULTI_CPU.
    assert "not configured: accelerator.distributed_type is " in printed
    assert "; expected DEEPSPEED. Give the experiment a hyperparameters.deepspeed_config" in printed
    assert "plain model: accelerator.prepare returned a Linear; expected a DeepSpeed engine" in printed
    assert (
        "although DeepSpeed is configured (ACCELERATE_USE_DEEPSPEED is true); expected DEEPSPEED" in printed
    )
    assert "Make the accelerator without cpu=True" in printed
    assert "not refused" not in printed
    assert ended.returncode != 0
    assert [trial["state"] for trial in trials] == ["STATE_ERROR"]
    assert experiment["state"] == "STATE_ERROR"


def test_trial_stopped_by_searcher_is_completed(shared_master: MasterForTest, tmp_path: Path) -> None:
    # Trials run in turn, and the metric is the trial id: the second is worse, and is stopped early.
    searcher = {
        **{"name": "async_halving", "metric": "trial_id", "smaller_is_better": True, "max_trials": 2},
        **{"max_concurrent_trials": 1, "num_rungs": 2, "divisor": 4},
        **{"time_metric": "batches", "max_time": 160},
    }
    ended, experiment, trials = run_under_a_master(
        shared_master,
        tmp_path,
        searcher=searcher,
        # Accelerate replaces "auto" by the batch size of the script's loader.
        hyperparameters={"deepspeed_config": {**AUTO_BATCH, "zero_optimization": {"stage": 2}}},
        scheduling_unit=100,
        min_validation_period={"batches": 40},
        min_checkpoint_period={"batches": 0},
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [trial["state"] for trial in trials] == ["STATE_COMPLETED"] * 2
    assert trials[0]["totalBatchesProcessed"] == 160
    assert 40 <= trials[1]["totalBatchesProcessed"] < 160
    assert experiment["state"] == "STATE_COMPLETED"
    sizes = set()
    for path in tmp_path.rglob("metadata.json"):
        (engine,) = json.loads(path.read_text())["engines"]
        sizes.add((engine["train_batch_size"], engine["micro_batch_size"]))
    assert sizes == {(8, 4)}
