"""``dstrial checkpoint verify``, and how commands find checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.ranks

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def checkpoint_copy(checkpoints: Any, tmp_path: Path) -> Path:
    """Copy of a two-rank ZeRO 2 checkpoint, which a test may damage."""
    path = tmp_path / "run" / "checkpoints" / checkpoints["zero 2"].latest.name
    shutil.copytree(checkpoints["zero 2"].latest, path)
    return path


OPTIMIZER_FILE = "model0/zero_pp_rank_1_mp_rank_00_optim_states.pt"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("case", ["zero 0", "zero 2", "zero 3", "bf16", "two engines", "pipeline"])
def test_verify_accepts_saved_checkpoint(checkpoints: Any, dstrial_command: Command, case: str) -> None:
    exit_code, out, err = dstrial_command("checkpoint", "verify", checkpoints[case].latest)
    assert (exit_code, err) == (0, "")
    assert out.startswith(f"{checkpoints[case].latest} is intact: ")


@pytest.mark.parametrize(
    ("damage", "kind"),
    [(truncate, "truncated"), (lengthen, "longer"), (flip_a_bit, "changed"), (Path.unlink, "missing")],
)
def test_verify_names_damaged_file(
    checkpoint_copy: Path, dstrial_command: Command, damage: Callable[[Path], None], kind: str
) -> None:
    damage(checkpoint_copy / OPTIMIZER_FILE)
    exit_code, out, _ = dstrial_command("checkpoint", "verify", checkpoint_copy)
    assert exit_code == 1
    assert f"{OPTIMIZER_FILE} is {kind}: " in out
    assert "is damaged: 1 fault in " in out


def test_verify_json_lists_all_faults(checkpoint_copy: Path, dstrial_command: Command) -> None:
    truncate(checkpoint_copy / OPTIMIZER_FILE)
    (checkpoint_copy / "dstrial_rank0.pt").unlink()
    (checkpoint_copy / "model0" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"stray")
    exit_code, out, _ = dstrial_command("checkpoint", "verify", checkpoint_copy, "--json")
    found = json.loads(out)
    assert (exit_code, found["is_whole"]) == (1, False)
    assert [(fault["path"], fault["kind"]) for fault in found["faults"]] == [
        ("dstrial_rank0.pt", "missing"),
        (OPTIMIZER_FILE, "truncated"),
        ("model0/zero_pp_rank_2_mp_rank_00_optim_states.pt", "unexpected"),
    ]


def test_verify_reports_missing_or_malformed_manifest(
    checkpoint_copy: Path, dstrial_command: Command
) -> None:
    flawed = (checkpoint_copy / "manifest.json").read_text()[:-40]
    (checkpoint_copy / "manifest.json").write_text(flawed)
    exit_code, out, err = dstrial_command("checkpoint", "verify", checkpoint_copy)
    assert (exit_code, out) == (1, "")
    assert "manifest.json is no JSON" in err
    (checkpoint_copy / "manifest.json").unlink()
    exit_code, out, err = dstrial_command("checkpoint", "verify", checkpoint_copy, "--json")
    assert exit_code == 1
    assert "manifest.json" in json.loads(out)["error"]


def test_verify_in_run_requires_completion_marker(
    checkpoints: Any, checkpoint_copy: Path, dstrial_command: Command
) -> None:
    (checkpoint_copy / "COMPLETE").unlink()
    assert dstrial_command("checkpoint", "verify", checkpoint_copy)[0] == 0, "as in the storage of a cluster"
    shutil.copy(checkpoints["zero 2"].run_path / "run.json", checkpoint_copy.parents[1])
    exit_code, out, _ = dstrial_command("checkpoint", "verify", checkpoint_copy)
    assert exit_code == 1
    assert "COMPLETE is incomplete: no file" in out


def test_verify_finds_uuid_in_runs_directory(
    checkpoints: Any, dstrial_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints["zero 3"]
    runs_dir = made.run_path.parents[1]
    exit_code, out, _ = dstrial_command("checkpoint", "verify", made.earlier.name, "--runs-dir", runs_dir)
    assert exit_code == 0
    assert str(made.earlier) in out
    monkeypatch.setenv("DSTRIAL_RUNS_DIR", str(runs_dir))
    assert dstrial_command("checkpoint", "verify", made.latest.name)[0] == 0


def test_invalid_checkpoint_or_output_argument_is_reported(dstrial_command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unknown = "6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11"
    for asked, words in [
        (tmp_path, "a directory without manifest.json; expected the directory of a checkpoint"),
        (tmp_path / "nowhere", "no directory; expected the directory of a checkpoint"),
        (tmp_path / "file", "a file; expected the directory of a checkpoint"),
        (unknown, "and no master runs with state directory"),
    ]:
        exit_code, out, err = dstrial_command(
            "checkpoint", "verify", asked, "--runs-dir", tmp_path / "runs", "--state-dir", tmp_path / "state"
        )
        assert (exit_code, out) == (1, "")
        assert words in err
        assert "Traceback" not in err
    exit_code, _, err = dstrial_command("checkpoint", "download", "no-such-checkpoint", "-o", tmp_path)
    assert exit_code == 1
    assert "which exists; expected a new directory" in err


def test_verify_finds_uuid_through_running_master(
    reported_checkpoint: tuple[str, int], shared_master: MasterForTest
) -> None:
    uuid, experiment_id = reported_checkpoint
    options = (uuid, "--state-dir", str(shared_master.state.path))
    verified = shared_master.dstrial("checkpoint", "verify", *options)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    inspected = shared_master.dstrial("checkpoint", "inspect", *options, "--json")
    contents = json.loads(inspected.stdout)
    assert (contents["uuid"], contents["experiment_id"]) == (uuid, experiment_id)
    unknown = shared_master.dstrial(
        "checkpoint", "verify", "6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11", *options[1:]
    )
    assert unknown.returncode == 1
    assert "does not know it" in unknown.stderr
