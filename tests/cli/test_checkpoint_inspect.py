"""``dstrial checkpoint inspect`` on real checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

Command = Callable[..., tuple[int, str, str]]


def run_inspect(command: Command, path: Path, *options: str) -> dict[str, Any]:
    exit_code, out, err = command("checkpoint", "inspect", path, "--json", *options)
    assert (exit_code, err) == (0, "")
    contents: dict[str, Any] = json.loads(out)
    return contents


def test_inspect_of_run_directory_shows_newest_checkpoint(checkpoints: Any, dstrial_command: Command) -> None:
    made = checkpoints["zero 2"]
    contents = run_inspect(dstrial_command, made.run_path)
    assert (contents["path"], contents["uuid"]) == (str(made.latest), made.latest.name)
    assert (contents["steps_completed"], contents["experiment"]) == (3, "wide")
    assert contents["run_directory"] == str(made.run_path)
    assert run_inspect(dstrial_command, made.earlier)["steps_completed"] == 2
    first, second = run_inspect(dstrial_command, checkpoints["two engines"].latest)["engines"]
    assert (first["parameters"]["parameters"], second["parameters"]["parameters"]) == (7, 4)


PARAMETERS = {
    "parameters": 7,
    "elements": 104 + 182 + 112 + 56,
    "frozen_parameters": 2,
    "frozen_elements": 182,
    "left_out": 0,
    "not_optimized": 0,
    "tied": {"unembed.weight": "embed.weight"},
}
LAYOUT = ("engine_kind", "world_size", "data_parallel_size", "pipeline_stages", "zero_stage", "precision")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("zero 0", ("data_parallel", 2, 2, 1, 0, "fp32")),
        ("zero 2", ("data_parallel", 2, 2, 1, 2, "fp32")),
        ("zero 3", ("data_parallel", 2, 2, 1, 3, "fp32")),
        ("bf16", ("data_parallel", 2, 2, 1, 1, "bf16")),
        ("pipeline", ("pipeline", 2, 1, 2, 1, "fp32")),
    ],
)
def test_inspect_shows_layout_parameters_and_optimizer(
    checkpoints: Any, dstrial_command: Command, case: str, layout: tuple[object, ...]
) -> None:
    (engine,) = run_inspect(dstrial_command, checkpoints[case].latest)["engines"]
    assert tuple(engine[name] for name in LAYOUT) == layout
    assert engine["train_batch_size"] == 8
    assert engine["versions"].keys() == {"deepspeed", "torch", "dstrial", "python"}
    if case != "pipeline":
        assert engine["parameters"] == PARAMETERS
    state = engine["optimizer_state"]
    assert (state["steps"], state["global_steps"], state["skipped_steps"]) == ([3], 3, 0)
    assert state["state"] == ["exp_avg", "exp_avg_sq"]
    assert all(0 < group["lr"] < 0.01 for group in state["groups"])
    assert len(state["groups"]) == (1 if case == "pipeline" else 2)


def test_inspect_sizes_match_files_on_disk(checkpoints: Any, dstrial_command: Command) -> None:
    path = checkpoints["pipeline"].latest
    contents = run_inspect(dstrial_command, path)
    beside = {"manifest.json", "COMPLETE", "metadata.json"}
    on_disk = {file: file.stat().st_size for file in path.rglob("*") if file.is_file()}
    expected = sum(size for file, size in on_disk.items() if file.name not in beside)
    assert contents["num_bytes"] == expected


def test_parameter_table_has_shape_group_and_stage(checkpoints: Any, dstrial_command: Command) -> None:
    (engine,) = run_inspect(dstrial_command, checkpoints["pipeline"].latest, "--parameters")["engines"]
    rows = {(row["name"], row["stage"]): row for row in engine["parameter_table"]}
    assert rows["0.weight", 0]["shape"] == [9, 8]
    assert rows["tied_modules.called.weight", 1]["tied_to"] == "tied_modules.called.weight"
    exit_code, out, _ = dstrial_command("checkpoint", "inspect", checkpoints["zero 2"].latest, "--parameters")
    assert exit_code == 0
    table = [line.split() for line in out.splitlines() if line.startswith(("frozen.weight", "unembed"))]
    assert table == [
        ["frozen.weight", "13x13", "float32", "169", "-", "0", "frozen", "-"],
        ["unembed.weight", "13x8", "float32", "104", "0", "0", "yes", "embed.weight"],
    ]


def test_inspect_text_summarizes_steps_layout_and_parameters(
    checkpoints: Any, dstrial_command: Command
) -> None:
    exit_code, out, _ = dstrial_command("checkpoint", "inspect", checkpoints["bf16"].latest)
    assert exit_code == 0
    assert "after 3 batches" in out
    for line in ("zero_stage: 1", "precision: bf16", "elements: 454", "unembed.weight: embed.weight"):
        assert f"  {line}\n" in out, out


def test_inspect_without_engine_file_still_shows_layout(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(checkpoints["zero 2"].latest, path)
    (path / "model0" / "mp_rank_00_model_states.pt").unlink()
    exit_code, out, err = dstrial_command("checkpoint", "inspect", path)
    assert (exit_code, err) == (0, "")
    assert "mp_rank_00_model_states.pt is missing" in " ".join(out.split())
    assert "zero_stage: 2" in out
