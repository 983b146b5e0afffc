"""Dry runs of trials and scripts with fake tensors, or with one real batch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from searching import settings_of, write_experiment

from dstrial.dsat.dry_runs import gather_inputs, request_maker
from dstrial.dsat.predictor.inputs import PredictInputs, dry_run_request
from dstrial.dsat.space import Structure
from dstrial.engine.dryrun.__main__ import user_place
from dstrial.engine.dryrun.process import DryRunError, dry_run, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace

pytestmark = pytest.mark.process

HERE = Path(__file__).parent / "described"
MODEL_DEFS = Path(__file__).parents[3] / "model_defs"
WIDTH = 64
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
}


def described(trial: str, sample_batch: Path | None = None) -> ModelTrace:
    hparams = {"width": WIDTH, "deepspeed_config": CONFIG}
    asked = dry_run_request(
        f"described_trials:{trial}", HERE, hparams, world_size=4, sample_batch=sample_batch
    )
    return dry_run(asked, deadline_s=120)


def test_dry_run_describes_trial_with_fake_tensors() -> None:
    result = described("Ordinary")

    # The output layer shares its weight with the embedding.
    assert result.parameters == 100 * WIDTH + WIDTH * WIDTH + WIDTH
    assert result.tokens is not None
    assert result.tokens.at(8) == 8 * 16
    assert [Path(place.rsplit(":", 1)[0]).name for place in result.bypasses] == ["described_trials.py"]
    assert result.epoch_records == 50
    # Weights and Adam's two moments, before ZeRO divides them.
    assert result.memory.settled == pytest.approx((4 + 8) * result.parameters, rel=0.1)


def test_sample_batch_file_replaces_loader(tmp_path: Path) -> None:
    torch.save((torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 24, dtype=torch.long)), tmp_path / "pt")

    result = described("Ordinary", tmp_path / "pt")

    assert result.tokens is not None
    assert result.tokens.at(8) == 8 * 24


def gathered(trial: str, folder: Path) -> tuple[PredictInputs, list[str]]:
    path = write_experiment(
        folder,
        entrypoint=f"described_trials:{trial}",
        hyperparameters={"width": WIDTH, "deepspeed_config": "ds_config.json"},
        resources={"slots_per_trial": 4},
    )
    settings = settings_of(path, "-z", "1", method="predict", model_dir=HERE)
    lines: list[str] = []
    return gather_inputs(settings, target="cpu", print_line=lines.append), lines


def test_trial_reading_tensor_values_uses_real_batch(
    tmp_path: Path,
) -> None:
    inputs, lines = gathered("ByValue", tmp_path)

    assert inputs.described_by == "one real batch"
    assert any(line.startswith("described by:  one real batch") for line in lines)
    assert inputs.runs
    assert any("described_trials.py" in note and "real batch was trained" in note for note in inputs.notes)


def test_broken_trial_is_reported_and_uses_asha(
    tmp_path: Path,
) -> None:
    inputs, _ = gathered("Broken", tmp_path)

    assert (inputs.described_by, inputs.runs) == ("nothing", {})
    assert any("asha searches in place of predict" in note for note in inputs.notes)
    assert any(
        re.search(r"described_trials\.py:\d+ by ValueError: no loss today", note) for note in inputs.notes
    )


def test_dry_run_of_pipeline_needs_its_stages() -> None:
    """Without ``num_stages`` the error says that the trial trains a pipeline."""
    folder = MODEL_DEFS / "stdlib_lm"
    hparams = yaml.safe_load((MODEL_DEFS.parent / "experiment_configs" / "stdlib_lm.yaml").read_text())[
        "hyperparameters"
    ]

    def asked(num_stages: int) -> DryRunRequest:
        trial = "model_def:StdlibLmTrial"
        return dry_run_request(trial, folder, hparams, world_size=2, num_stages=num_stages)

    one, two = dry_runs([asked(1), asked(2)], deadline_s=300, num_parallel=1)

    assert isinstance(one, DryRunError)
    assert "the trial trains a pipeline" in str(one)
    assert isinstance(two, ModelTrace)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("stdlib_lm", {}, "pipelines have no predicted times"),
        ("dsat_trial", {"tensor_parallel": {"autotp_size": 2}}, "no tensor- or sequence-parallel groups"),
    ],
)
def test_parallel_model_is_not_dry_run(
    name: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    given = yaml.safe_load((MODEL_DEFS.parent / "experiment_configs" / f"{name}.yaml").read_text())
    given["hyperparameters"].setdefault("overwrite_deepspeed_args", {}).update(changes)
    given["resources"] = {"slots_per_trial": 2}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(given))
    flags = ("--output", str(tmp_path / "out"))
    settings = settings_of(path, *flags, method="predict", model_dir=MODEL_DEFS / name)

    inputs = gather_inputs(settings, target="cpu")

    assert (inputs.described_by, inputs.runs) == ("nothing", {})
    assert reason in inputs.notes[0]


def test_dry_run_of_two_engines_uses_both_configs() -> None:
    folder = MODEL_DEFS / "digits_gan"
    hparams = {
        "deepspeed_config": "generator.json",
        "discriminator_deepspeed_config": "discriminator.json",
        "noise_size": 16,
        "num_hidden": 32,
        "dropout": 0.3,
        "split_seed": 1,
    }

    asked = dry_run_request("model_def:DigitsGanTrial", folder, hparams, world_size=2)
    result = dry_run(asked)

    assert result.state_bytes["optimizer"] == pytest.approx(2 * result.state_bytes["parameters"], rel=0.01)


def test_dry_run_describes_script_with_sample_batch(tmp_path: Path) -> None:
    hparams = {"width": WIDTH, "deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {}}
    words = ["-m", "core_api_script", "--records", "40"]

    torch.save(torch.zeros(6, 5, 16), tmp_path / "batch.pt")

    asked = dry_run_request(words, HERE, hparams, world_size=4, sample_batch=tmp_path / "batch.pt")
    result = dry_run(asked)

    assert result.parameters == 16 * WIDTH + WIDTH + WIDTH * 4 + 4
    assert result.flops.model.at(8) == pytest.approx(2 * 8 * result.flops.model.at(4) / 8)
    # Each record of the batch file contains five training records of the script.
    assert result.flops.model.at(1) == pytest.approx(5 * (4 * 16 * WIDTH + 6 * WIDTH * 4), rel=0.1)
    assert any("loss is not part of its model" in note for note in result.notes)


def test_dry_run_of_trainer_script_leaves_no_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "dsat_hf"
    shutil.copytree(MODEL_DEFS / "dsat_hf", folder, ignore=shutil.ignore_patterns("__pycache__", "output"))
    before = sorted(path.name for path in folder.iterdir())
    config = MODEL_DEFS.parent / "experiment_configs" / "dsat_hf.yaml"
    settings = settings_of(config, method="predict", model_dir=folder)
    assert settings.space.base["optimizer"]["params"]["lr"] == "auto"

    asked = request_maker(settings)(Structure(settings.space.own_stage, ()))
    result = dry_run(asked)

    assert result.tokens is not None
    rule = 6 * result.parameters * result.tokens.at(8)
    assert result.flops.model.at(8) / rule == pytest.approx(1.09, abs=0.05)
    assert result.memory.settled == pytest.approx((4 + 8) * result.parameters, rel=0.1)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_user_place_of_library_error_is_caller() -> None:
    code = compile("import json\njson.loads('no')\n", "train.py", "exec")
    try:
        exec(code, {})
    except json.JSONDecodeError as error:
        place = user_place(error)

    # The innermost frame of user code; the frame of this test is further out.
    assert place == "train.py:2"


def test_limit_memory_makes_large_allocation_fail() -> None:
    code = (
        "from dstrial.engine.dryrun.__main__ import limit_memory\n"
        "print(limit_memory(1 << 30))\n"
        "try:\n"
        "    bytearray(1 << 30)\n"
        "except MemoryError:\n"
        "    print('refused')\n"
        "print(len(bytearray(1 << 20)))\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == [str(int(0.9 * 2**30)), "refused", str(1 << 20)]
