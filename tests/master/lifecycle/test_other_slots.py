"""A real trial resumes with another number of slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_batch import SIZES_OF_ONE, batches_of, create, project, state_of, wait_for_end
from submitting import agent_of, log_of
from waiting import wait_for

from dstrial.errors import DstrialError
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


def continued(master: MasterForTest, experiment_id: int, changes: dict[str, Any]) -> str:
    """Continue an experiment; return the master's error, or an empty string."""
    body = {"id": experiment_id, "overrideConfig": yaml.safe_dump(changes)}
    try:
        master.client().post("/api/v1/experiments/continue", body)
    except DstrialError as error:
        return str(error)
    return ""


def test_paused_experiment_resumes_with_fewer_slots(tmp_path: Path) -> None:
    config, context = project(tmp_path, "kept", batches=60, sleep_s=0.25)
    log = tmp_path / "kept.log"
    with master_for_test(tmp_path, num_slots=2) as master:
        create(master, (config, context))
        wait_for(lambda: Path(f"{log}.0").exists() and len(batches_of(log)) >= 3, deadline_s=120)
        assert master.det("e", "pause", "1").returncode == 0
        wait_for(lambda: "resources exited successfully" in log_of(master, 1), deadline_s=120)
        assert "sizes [12, 6, 1, 2]" in log_of(master, 1)
        trained = batches_of(log)
        assert trained == list(range(len(trained)))
        assert len(trained) < 60

        assert master.dstrial("down").returncode == 0
        up = master.dstrial("up", "--slots", "1", "--port", str(master.record.port))
        assert up.returncode == 0, up.stdout + up.stderr
        assert master.det("e", "activate", "1").returncode == 0
        wait_for(lambda: SIZES_OF_ONE in log_of(master, 1), deadline_s=120)
        assert "the trial requests 2 slots and resumes from its checkpoint with 1" in log_of(master, 1)
        assert "the batch of engine 0 stays as it was: train_batch_size 12" in log_of(master, 1)
        wait_for(lambda: len(batches_of(log)) > len(trained), deadline_s=60)
        assert master.det("e", "cancel", "1").returncode == 0
        wait_for(lambda: state_of(master, 1) == "CANCELED", deadline_s=120)

        # A changed batch size and an unsatisfiable min_slots are refused before anything starts.
        wrong = {"hyperparameters": {"overwrite_deepspeed_args": {"train_batch_size": 16}}}
        refused = continued(master, 1, wrong)
        assert "train_batch_size is 16; expected 12, the batch of checkpoint" in refused
        held = continued(master, 1, {"data": {"dstrial": {"min_slots": 2}}})
        assert "resources.slots_per_trial is 2; expected at most 1" in held
        done = len(batches_of(log))
        last = {"batches": done + 2}
        words = ("--config", "resources.slots_per_trial=1", "--config", f"searcher.max_length={last}")
        again = master.det("e", "continue", "1", *words)
        assert again.returncode == 0, again.stdout + again.stderr
        wait_for_end(master, 1)
        assert batches_of(log) == list(range(done + 2))


def test_trial_resumes_without_drained_slot_within_max_slots(
    tmp_path: Path,
) -> None:
    killed = {"KILL_AT": "0:6", "KILL_MARKER": str(tmp_path / "killed")}
    config, context = project(
        tmp_path,
        "drained",
        batches=90,
        sleep_s=0.2,
        max_restarts=1,
        min_checkpoint_period={"batches": 2},
        environment={"environment_variables": [f"{name}={value}" for name, value in killed.items()]},
    )
    log = tmp_path / "drained.log"
    with master_for_test(tmp_path, num_slots=2) as master:
        create(master, (config, context))
        wait_for(lambda: Path(f"{log}.0").exists(), deadline_s=120)
        agent = agent_of(master)
        master.client("admin").post(f"/api/v1/agents/{agent}/slots/1/disable", {"drain": True})
        wait_for(lambda: SIZES_OF_ONE in log_of(master, 1), deadline_s=120)
        assert (tmp_path / "killed").exists(), log_of(master, 1)
        wait_for(lambda: len(batches_of(log)) > 6, deadline_s=60)

        master.client("admin").post(f"/api/v1/agents/{agent}/slots/1/enable")
        limited = master.det("e", "set", "max-slots", "1", "1")
        assert limited.returncode == 0, limited.stdout + limited.stderr
        assert master.det("e", "pause", "1").returncode == 0
        wait_for(lambda: "resources exited successfully" in log_of(master, 1), deadline_s=120)
        trained = batches_of(log)
        assert trained == list(range(len(trained)))
        assert master.det("e", "activate", "1").returncode == 0
        wait_for(lambda: len(batches_of(log)) > len(trained), deadline_s=120)
        wait_for(lambda: log_of(master, 1).count(SIZES_OF_ONE) == 2, deadline_s=60)
        assert master.det("e", "kill", "1").returncode == 0
        wait_for(lambda: state_of(master, 1) == "CANCELED", deadline_s=120)


def test_dstrial_run_resumes_if_slots_divide_batch(tmp_path: Path) -> None:
    config, context = project(tmp_path, "run", batches=3, sleep_s=0.0)
    log = tmp_path / "run.log"
    with master_for_test(tmp_path, num_slots=2) as master:
        words = ("run", str(config), str(context), "--runs-dir", str(tmp_path / "runs"))
        first = master.dstrial(*words)
        assert first.returncode == 0, first.stdout + first.stderr

        longer = ("--config", "searcher.max_length.batches=7", "--resume", "latest")
        refused = master.dstrial(*words, *longer, "--slots", "5")
        assert refused.returncode == 1, refused.stdout + refused.stderr
        assert "which 5 data-parallel replicas cannot share evenly" in refused.stderr
        assert "Go on with 4 or 6 slots" in refused.stderr
        check = ("check", str(config), str(context), "--runs-dir", str(tmp_path / "runs"), *longer)
        assert master.dstrial(*check, "--slots", "5").stderr.count("cannot share evenly") == 1
        checked = master.dstrial(*check, "--slots", "1")
        assert checked.returncode == 0, checked.stderr
        assert (
            "train_batch_size 12 = train_micro_batch_size_per_gpu 6 x gradient_accumulation_steps 2 x 1"
            in (checked.stdout)
        )

        assert master.dstrial("down").returncode == 0
        up = master.dstrial("up", "--slots", "1", "--port", str(master.record.port))
        assert up.returncode == 0, up.stdout + up.stderr
        # The config asks for two slots, and there is one.
        second = master.dstrial(*words, *longer)
        assert second.returncode == 0, second.stdout + second.stderr
        assert SIZES_OF_ONE in second.stdout + second.stderr
        assert batches_of(log) == list(range(7))
