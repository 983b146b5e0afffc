"""``dstrial checkpoint reshape``: the output is bitwise equal and resumes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_start
import yaml
from checkpoint_maker import DEFINITIONS

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import layouts_of, read_manifest, write_manifest
from dstrial.engine.checkpoint_reader.open import open_saved_engine
from dstrial.engine.checkpoint_reader.saved_engine import MASTER
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.ranks

Command = Callable[..., tuple[int, str, str]]


def reshape(*words: object) -> subprocess.CompletedProcess[str]:
    command = ["dstrial.cli", "checkpoint", "reshape", *map(str, words)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DSTRIAL_TIMEOUT_S": "100"}
    return warm_start.run(command, env=environ, cwd=Path.cwd(), timeout=200)


def layout_in(path: Path) -> Layout:
    return Layout.from_json(read_manifest(path).layouts[0])


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's moments of a checkpoint's first engine."""
    saved = open_saved_engine(path, 0, layouts_of(read_manifest(path), path)[0])
    own = [name for name, place in saved.places.items() if place.tied_to is None and saved.holds(name)]
    return {
        f"{name} {key}": saved.full(name, key) for name in own for key in (MASTER, *saved.state_keys(name))
    }


def require_equal(a: Path, b: Path) -> None:
    assert read_manifest(a).steps_completed == read_manifest(b).steps_completed
    torch.testing.assert_close(state_of(a), state_of(b), rtol=0, atol=0)


def test_reshaped_checkpoint_is_bitwise_equal_and_resumes(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    made = checkpoints["zero 2"]
    output = tmp_path / "for one"
    done = reshape(made.earlier, output, "--slots", 1, "--zero-stage", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (layout_in(output).world_size, layout_in(output).zero_stage) == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["for one"]
    assert dstrial_command("checkpoint", "verify", output)[0] == 0
    require_equal(made.earlier, output)

    config = yaml.safe_load((made.run_path / "experiment.yaml").read_text())
    config["hyperparameters"]["deepspeed_config"]["zero_optimization"]["stage"] = 3
    resumed = RunDirectory.create(
        tmp_path / "runs", name="resumed", context_dir=DEFINITIONS, command=["test"], config=config
    )
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_RUN_DIR": str(resumed.path),
        "DSTRIAL_RESUME": str(output),
    }
    command = ["dstrial.launch", "--slots", "1", "--trial", "wide_trials:WideTrial"]
    command += ["--config", str(tmp_path / "experiment.yaml"), "--context-dir", str(DEFINITIONS)]
    run = warm_start.run(command, env=environ, cwd=tmp_path, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "is brought into another layout" not in run.stderr
    assert "at batch 2" in run.stderr
    (last,) = resumed.checkpoints_path.iterdir()
    # Not bitwise equal: each replica computes running means from its own records only.
    torch.testing.assert_close(state_of(last), state_of(made.latest), rtol=1e-3, atol=1e-3)


def change_experiment(path: Path, change: dict[str, str] | None) -> None:
    saved = json.loads((path / "load_data.json").read_text())
    saved["experiment_config"] = None if change is None else {**saved["experiment_config"], **change}
    (path / "load_data.json").write_text(json.dumps(saved))


def use_fp16(path: Path) -> None:
    manifest = read_manifest(path)
    layouts = tuple({**layout, "precision": "fp16"} for layout in manifest.layouts)
    write_manifest(path, dataclasses.replace(manifest, layouts=layouts))


@pytest.mark.parametrize(
    ("change", "num_slots", "has_context", "words"),
    [
        (lambda path: None, 3, True, "which 3 data-parallel replicas cannot share evenly"),
        (lambda path: None, 1, False, "has no model definition beside it"),
        (use_fp16, 1, False, "computes in fp16; expected fp32 or bf16"),
        (
            lambda path: change_experiment(path, {"entrypoint": "python3 -m dstrial.launch train.py"}),
            1,
            True,
            "entrypoint is the command 'train.py'",
        ),
        (lambda path: change_experiment(path, None), 1, True, "has no experiment_config and hparams"),
    ],
    ids=["batch", "no definition", "fp16", "script", "no config"],
)
def test_invalid_reshape_is_rejected_before_ranks_start(
    checkpoints: Any,
    dstrial_command: Command,
    tmp_path: Path,
    change: Callable[[Path], None],
    num_slots: int,
    has_context: bool,
    words: str,
) -> None:
    path = tmp_path / "given"
    shutil.copytree(checkpoints["zero 2"].latest, path)
    change(path)
    context = shutil.copytree(DEFINITIONS, tmp_path / "context")
    (context / "train.py").write_text("")
    options = ("--slots", num_slots, *(("--context", context) if has_context else ()))
    exit_code, _, err = dstrial_command("checkpoint", "reshape", path, tmp_path / "out", *options)
    assert exit_code == 1
    assert words in err
    assert {found.name for found in tmp_path.iterdir()} == {"given", "context"}


def test_failed_reshape_shows_error_and_leaves_no_output(checkpoints: Any, tmp_path: Path) -> None:
    context = tmp_path / "context"
    shutil.copytree(DEFINITIONS, context)
    definition = context / "wide_trials.py"
    definition.write_text(definition.read_text().replace("self.head = nn.Linear(13, 4)", "self.head = None"))
    done = reshape(checkpoints["zero 2"].latest, tmp_path / "out", "--slots", 1, "--context", context)
    assert done.returncode == 1
    assert "failed; nothing was written" in done.stderr
    assert "parameter head.bias is gone" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["context"]


def test_reshape_by_uuid_keeps_pipeline_stages(
    checkpoints: Any, reported_checkpoint: tuple[str, int], shared_master: MasterForTest, tmp_path: Path
) -> None:
    output = tmp_path / "four"
    words = ("checkpoint", "reshape", reported_checkpoint[0], str(output), "--slots", "4")
    done = shared_master.dstrial(*words, "--context", str(DEFINITIONS), deadline_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    layout = layout_in(output)
    assert (layout.pipeline_stages, layout.data_parallel_size, layout.train_batch_size) == (2, 2, 8)
    require_equal(checkpoints["pipeline"].latest, output)
