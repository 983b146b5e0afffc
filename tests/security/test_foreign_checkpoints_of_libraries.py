"""Foreign checkpoints of the Hugging Face Trainer and of Accelerate run no code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import warm_start
import yaml

from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_script

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

INTEGRATIONS = Path(__file__).parent.parent / "integrations"
TRAINER_PROGRAM = INTEGRATIONS / "huggingface" / "trainer_program.py"
REPORTER_PROGRAM = INTEGRATIONS / "accelerate" / "reporter_program.py"
DEADLINE_S = 280

REPORTER_CONFIG: dict[str, Any] = {
    "name": "reporter",
    "entrypoint": "python3 -m dstrial.launch reporter_program.py",
    "hyperparameters": {
        "deepspeed_config": {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
        }
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 2}},
    "checkpoint_policy": "none",
}


def trainer_runs(directory: Path, runs: list[dict[str, Any]], **env: str) -> list[dict[str, Any]]:
    """Run the Trainer once for each of the settings; return the results in order."""
    path = directory / "runs.json"
    common = {"stage": 2, "micro": 4, "eval_steps": None, "output": str(directory / "output")}
    for idx, asked in enumerate(runs):
        made = RunDirectory.create(
            directory / "runs", name=f"run{idx}", context_dir=directory, command=["test"], config={}
        )
        runs[idx] = {**common, "run_dir": str(made.path), **asked}
    path.write_text(json.dumps(runs))
    run_script(TRAINER_PROGRAM, 1, str(path), deadline_s=DEADLINE_S, env={"HF_HUB_OFFLINE": "1", **env})
    facts: list[dict[str, Any]] = json.loads(path.with_name("runs.json.0").read_text())
    return facts


def test_trainer_resumes_foreign_data_without_running_code(tmp_path: Path) -> None:
    first = [{"steps": 2}]
    trainer_runs(tmp_path, first)
    own = newest_checkpoint(Path(first[0]["run_dir"]) / "checkpoints")
    assert own is not None
    engine = next(path.relative_to(own.path) for path in own.path.rglob("mp_rank_00_model_states.pt"))
    random_states = next(path.relative_to(own.path) for path in own.path.rglob("rng_state*.pth"))
    poisons: dict[str, tuple[Path, Any]] = {
        "engine": (engine, foreign.Payload(tmp_path / "code-of-engine")),
        "random states": (random_states, foreign.Payload(tmp_path / "code-of-random-states")),
        "array": (random_states, foreign.ObjectsAsNumbers()),
    }
    copies = {"clean": foreign.foreign_copy(own.path, tmp_path / "clean")}
    for name, (file, value) in poisons.items():
        copies[name] = foreign.foreign_copy(own.path, tmp_path / name)
        foreign.poison(copies[name], file.as_posix(), value)

    again = tmp_path / "again"
    again.mkdir()

    found = dict(
        zip(
            copies,
            trainer_runs(
                again,
                [{"steps": 4, "resume": str(path), "error": True} for path in copies.values()],
                XDG_DATA_HOME=str(tmp_path / "data"),
            ),
            strict=True,
        )
    )

    assert found["clean"].get("global_step") == 4, found["clean"]
    assert not list(tmp_path.glob("code-of-*"))
    for name, (file, _) in poisons.items():
        error = found[name]["error"]
        assert error.startswith("UntrustedCheckpointError"), error
        assert file.as_posix() in error
        assert ("numpy.dtype" if name == "array" else "os.makedirs") in error


def reporter_run(directory: Path, *, batches: int = 4, **env: str) -> tuple[int, str]:
    directory.mkdir(exist_ok=True)
    shutil.copy(REPORTER_PROGRAM, directory)
    searcher = REPORTER_CONFIG["searcher"]
    (directory / "e.yaml").write_text(
        yaml.safe_dump({**REPORTER_CONFIG, "searcher": {**searcher, "max_length": {"batches": batches}}})
    )
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    ended = warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "1", "reporter_program.py"],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env},
        timeout=DEADLINE_S,
        is_merged=True,
    )
    return ended.returncode, ended.stdout


def test_accelerate_resumes_foreign_data_without_running_code(tmp_path: Path) -> None:
    code, output = reporter_run(tmp_path / "first", batches=2)
    assert code == 0, output
    (run,) = (tmp_path / "first").glob("runs/reporter/*")
    own = foreign.latest(run)
    data = {"XDG_DATA_HOME": str(tmp_path / "data")}
    clean = foreign.foreign_copy(own, tmp_path / "clean")
    custom = foreign.foreign_copy(own, tmp_path / "custom")
    # Accelerate always loads this file with weights_only=False.
    foreign.poison(custom, "custom_checkpoint_0.pkl", foreign.Payload(tmp_path / "code-of-custom"))
    states = foreign.foreign_copy(own, tmp_path / "states")
    # Accelerate ignores errors in this file and would train without the random states.
    foreign.poison(states, "random_states_0.pkl", foreign.ObjectsAsNumbers())

    code, output = reporter_run(tmp_path / "second", DSTRIAL_RESUME=str(clean), **data)
    assert code == 0, output
    (run,) = (tmp_path / "second").glob("runs/reporter/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["steps_completed"] for row in rows if row["group"] == "training"} <= {3, 4}
    assert "at 4 of 4" in output

    for path, file, name in (
        (custom, "custom_checkpoint_0.pkl", "os.makedirs"),
        (states, "random_states_0.pkl", "numpy.dtype"),
    ):
        code, output = reporter_run(tmp_path / f"with-{path.name}", DSTRIAL_RESUME=str(path), **data)
        assert not list(tmp_path.glob("code-of-*"))
        assert code != 0
        assert file in output, output
        assert name in output, output
