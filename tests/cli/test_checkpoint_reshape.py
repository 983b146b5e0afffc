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
import warm_start
import yaml
from checkpoint_maker import DEFINITIONS

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import read_manifest, write_manifest
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
    options = ("--only", "weights", "--only", "progress", "--optimizer", "--json")
    exit_code, out, _ = dstrial_command("checkpoint", "diff", made.earlier, output, *options)
    assert (exit_code, json.loads(out)["differences"]) == (0, {}), out

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
    exit_code, out, _ = dstrial_command(
        "checkpoint", "diff", made.latest, last, "--only", "weights", "--json"
    )
    # Not bitwise equal: each replica computes running means from its own records only.
    assert json.loads(out)["weights"][0]["relative"] < 1e-3, out


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


def test_reshape_by_uuid_uses_model_definition_from_master(
    checkpoints: Any,
    reported_checkpoint: tuple[str, int],
    shared_master: MasterForTest,
    dstrial_command: Command,
    tmp_path: Path,
) -> None:
    """The checkpoint has no model definition, so reshape downloads the master's."""
    output = tmp_path / "four"
    words = ("checkpoint", "reshape", reported_checkpoint[0], str(output), "--slots", "4")
    done = shared_master.dstrial(*words, deadline_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    layout = layout_in(output)
    assert (layout.pipeline_stages, layout.data_parallel_size, layout.train_batch_size) == (2, 2, 8)
    options = ("--only", "weights", "--only", "progress", "--optimizer")
    compared = dstrial_command("checkpoint", "diff", checkpoints["pipeline"].latest, output, *options)
    assert compared[0] == 0, compared[1]
