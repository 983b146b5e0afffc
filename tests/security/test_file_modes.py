"""Modes of files: private for a master, by the umask for its trials."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import yaml

from dstrial.testing.master import master_for_test

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "master"))
from submitting import config, log_of, submit, trials, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TRAIN = """
import os, pathlib, time
import determined as det

with det.core.init() as core:
    core.train.report_validation_metrics(1, {"score": 1.0})
    with core.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "state").write_text("x")
    (core.train.get_tensorboard_path() / "events.out.tfevents.1").parent.mkdir(exist_ok=True, parents=True)
    (core.train.get_tensorboard_path() / "events.out.tfevents.1").write_text("x")
    pathlib.Path("of-the-trial").write_text("x")
    print("umask", oct(os.umask(0)), oct(os.stat("of-the-trial").st_mode & 0o777))
    print("is ready", flush=True)
    while not os.path.exists(GATE):
        time.sleep(0.05)
"""
OPEN = stat.S_IRWXG | stat.S_IRWXO


def open_to_others(root: Path, *, below: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the modes of paths open to other accounts, outside of dirs ``below``."""
    found = {}
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in below]
        for name in [*files, *names]:
            mode = (Path(directory) / name).lstat().st_mode
            if mode & OPEN and not stat.S_ISLNK(mode):
                found[str((Path(directory) / name).relative_to(root))] = f"{stat.S_IMODE(mode):04o}"
    return found


def test_master_files_are_private_trial_files_follow_umask(
    tmp_path: Path,
) -> None:
    storage = tmp_path / "shared" / "checkpoints"
    gate = tmp_path / "gate"
    before = os.umask(0o022)
    try:
        with master_for_test(tmp_path) as master:
            given = config(checkpoint_storage={"type": "shared_fs", "host_path": str(storage)})
            experiment_id = submit(master, given, TRAIN.replace("GATE", repr(str(gate))))
            assert master.det("command", "run", "true").returncode == 0
            give_up = 600
            while "is ready" not in (log_of(master, experiment_id) if trials(master, experiment_id) else ""):
                give_up -= 1
                assert give_up, log_of(master, experiment_id)
            # A trial's own files may be open: the private directories above protect them.
            alive = open_to_others(master.state.path, below=("workdir", "model", "tensorboard"))
            (allocation,) = master.state.allocations_path.iterdir()
            walls = {
                name: f"{stat.S_IMODE((allocation / name).stat().st_mode):04o}"
                for name in ("workdir", "model", ".")
            }
            (spec,) = allocation.glob("spec.json")
            temporary = Path(yaml.safe_load(spec.read_text())["environment"]["TMPDIR"])
            walls["TMPDIR"] = f"{stat.S_IMODE(temporary.stat().st_mode):04o}"
            gate.touch()
            wait_until(master, experiment_id, "COMPLETED")
            log = log_of(master, experiment_id)
            stored = {
                str(path.relative_to(storage)): f"{stat.S_IMODE(path.stat().st_mode):04o}"
                for path in [storage, *storage.rglob("*")]
            }
            ended = open_to_others(master.state.path)
            assert stat.S_IMODE(master.state.path.stat().st_mode) == 0o700
    finally:
        os.umask(before)

    assert alive == {}
    assert ended == {}
    assert walls == {"workdir": "0700", "model": "0700", ".": "0700", "TMPDIR": "0700"}
    assert "umask 0o22 0o644" in log
    assert set(stored.values()) == {"0755", "0644"}, stored
    assert any("tfevents" in path for path in stored)
    assert any(path.endswith("state") for path in stored)


def test_master_start_restores_private_file_modes(tmp_path: Path) -> None:
    with master_for_test(tmp_path) as master:
        for path in master.state.path.iterdir():
            if path.is_file():
                path.chmod(0o644)
        assert master.dstrial("down", "--now").returncode == 0
        master.up()

        assert open_to_others(master.state.path) == {}
