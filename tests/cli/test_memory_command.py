"""``dstrial memory`` predicts a trial's memory, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrial.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
DIGITS = [str(ROOT / "experiment_configs" / "digits.yaml"), str(ROOT / "model_defs" / "digits")]
SCRIPT = [str(ROOT / "experiment_configs" / "hf_clm.yaml"), str(ROOT / "model_defs" / "hf_clm")]
ACCELERATE = [
    str(ROOT / "experiment_configs" / "accelerate_clm.yaml"),
    str(ROOT / "model_defs" / "accelerate_clm"),
]
PIPELINE = [str(ROOT / "experiment_configs" / "stdlib_lm.yaml"), str(ROOT / "model_defs" / "stdlib_lm")]


@pytest.mark.process
@pytest.mark.timeout(600)
def test_memory_of_trial_is_sum_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *DIGITS, "--slots", "1,3,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["answer"][0].startswith("One device is enough")
    one, three, two = found["devices"]
    for row in (one, two):
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
        assert sum(row[part] for part in parts) == pytest.approx(row["peak"], rel=1e-6)
        assert all(row[part] > 0 for part in parts)
    assert "train_batch_size" in three["problem"], "64 records cannot be shared by 3"
    # float32: master weights and Adam's two moments are 3 values per weight; ZeRO stage 1 partitions them.
    assert one["optimizer"] / one["parameters"] == pytest.approx(3, rel=0.1)
    assert two["optimizer"] / one["optimizer"] == pytest.approx(0.5, rel=0.1)


@pytest.mark.process
@pytest.mark.timeout(600)
def test_memory_of_pipeline_is_predicted_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *PIPELINE, "--slots", "1,2", "--json"]) == 0
    alone, first, second = json.loads(capsys.readouterr().out)["devices"]

    assert "multiple of 2" in alone["problem"]
    assert [alone["stage"], first["stage"], second["stage"]] == [None, 0, 1]
    # Each stage has two blocks; only the first stage has the position embeddings.
    assert first["parameters"] > second["parameters"] > 4 * 2 * 12 * 64 * 64
    # The first stage holds two micro batches in flight: 8 records of 64 characters, hidden size 64.
    assert first["largest"]["activations"] > 1.5 * second["largest"]["activations"] > 8 * 64 * 64 * 4
    for row in (first, second):
        assert row["gradients"] == row["parameters"]
        assert row["optimizer"] / row["parameters"] == pytest.approx(3, rel=0.01)


@pytest.mark.process
@pytest.mark.timeout(600)
def test_memory_of_script_includes_activations_of_batch(capsys: pytest.CaptureFixture[str]) -> None:
    # A small model and a short text are enough to check the proportions.
    small = ("--config", "hyperparameters.n_layer=2", "--config", "hyperparameters.num_chars_max=30000")
    assert main(["memory", *SCRIPT, "--slots", "1", "--json", *small]) == 0
    (row,) = json.loads(capsys.readouterr().out)["devices"]

    assert row["problem"] is None
    assert row["optimizer"] / row["parameters"] == pytest.approx(3, rel=0.01)
    assert row["largest"]["activations"] > row["parameters"]


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", ["digits_gan", "lora_clm"])
def test_memory_needs_more_than_its_parts(capsys: pytest.CaptureFixture[str], example: str) -> None:
    config = str(ROOT / "experiment_configs" / f"{example}.yaml")
    assert main(["memory", config, str(ROOT / "model_defs" / example), "--slots", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["devices"]
    assert row["problem"] is None
    assert row["fits"]
    assert row["needs"] > row["peak"] > row["parameters"] + row["optimizer"] > 0


@pytest.mark.process
@pytest.mark.timeout(600)
def test_memory_of_accelerate_script_names_measured_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *ACCELERATE, "--slots", "2", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["devices"]
    assert row["problem"] == (
        "the dry run is stopped at train.py:31: a loop with Reporter cannot be dry-run; expected a trial class, or a script that "
        "calls deepspeed.initialize. Train some batches: the summary of `dstrial run` shows the measured memory."
    )


INSTEAD = ("python3 -m dstrial.launch SCRIPT", "the summary of `dstrial run`")
AUTOTP = "hyperparameters.overwrite_deepspeed_args.tensor_parallel.autotp_size=2"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            ([*SCRIPT, "--slots", "1", "--config", f"entrypoint={command}"], (command, *INSTEAD))
            for command in ("torchrun train.py", "accelerate launch train.py")
        ),
        (
            [*SCRIPT, "--slots", "2", "--config", "resources.slots_per_trial=2", "--config", AUTOTP],
            ("tensor_parallel.autotp_size is 2; expected 1",),
        ),
        *(
            ([*DIGITS, f"--slots={text}"], ("expected numbers of devices",))
            for text in ("", "0", "1,x", "-2")
        ),
    ],
)
def test_memory_rejects_unsupported_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: tuple[str, ...]
) -> None:
    assert main(["memory", *arguments]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
