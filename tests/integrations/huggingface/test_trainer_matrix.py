"""``get_hf_args_with_overwrites`` output is valid for the real Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_start

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
NUM_RANKS = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of ``tools/trainer_arguments_table.py``, run on two ranks."""
    directory = tmp_path_factory.mktemp("table")
    file = directory / "table.json"
    script = str(ROOT / "tools" / "trainer_arguments_table.py")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = warm_start.run(
        ["dstrial.launch", "--slots", str(NUM_RANKS), script, "--json", str(file)],
        cwd=directory,
        env={
            **kept,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "TMPDIR": str(directory),
        },
        timeout=240,
        is_merged=True,
    )
    assert finished.returncode == 0, finished.stdout
    made: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return made


@pytest.mark.ranks
def test_trainer_accepts_hf_args_in_every_case(rows: list[dict[str, Any]]) -> None:
    refused = [(row["pair"], row["case"], row["verdict"]) for row in rows if row["verdict"] != "accepts"]

    assert len(rows) >= 95
    assert not refused
    assert {row["world_size"] for row in rows} == {NUM_RANKS}


@pytest.mark.ranks
def test_hf_args_every_argument_takes_effect(rows: list[dict[str, Any]]) -> None:
    assert not [(row["pair"], row["case"], row["ignored"]) for row in rows if row["ignored"]]


@pytest.mark.ranks
def test_matrix_contradictions_fail_in_trainer_alone(rows: list[dict[str, Any]]) -> None:
    alone = {(row["pair"], row["case"]): row["alone"] for row in rows}

    contradictory = {key: verdict for key, verdict in alone.items() if "contradict" in key[1]}
    assert len(contradictory) > 20
    assert not [key for key, verdict in contradictory.items() if verdict == "accepts"]
    assert [verdict for verdict in alone.values() if verdict.startswith("accepts and ignores")]


@pytest.mark.ranks
def test_hf_args_leave_user_input_untouched(rows: list[dict[str, Any]]) -> None:
    assert all(row["is_untouched"] for row in rows)


@pytest.mark.ranks
def test_hf_args_list_all_contradictions_together(rows: list[dict[str, Any]]) -> None:
    (row,) = (row for row in rows if row["case"] == "everything contradictory")

    contradictions = {flag: text for flag, contradicts, text in row["outcomes"] if contradicts}
    assert list(contradictions) == [
        "--deepspeed",
        "--per_device_train_batch_size",
        "--gradient_accumulation_steps",
        "--max_grad_norm",
        "--learning_rate",
        "--adam_epsilon",
        "--weight_decay",
        "--warmup_steps",
        "--adam_beta1",
        "--max_steps",
        "--bf16",
    ]
    for text in contradictions.values():
        assert "wins" in text
        assert "to win, " in text or "Set both" in text
