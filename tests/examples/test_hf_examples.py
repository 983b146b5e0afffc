"""The examples hf_image and hf_generate, paused and resumed on a master."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),  # two starts of a trial on a busy machine
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="Requires: [transformers]"),
]


def values_in(body: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = body.get("avg_metrics") or body.get("validation_metrics") or body
    return values


class RunningTrial:
    """The only trial of an experiment that is created from a shipped config."""

    def __init__(
        self, master: MasterForTest, config: dict[str, Any], definition: str, directory: Path
    ) -> None:
        self._master = master
        self._client = master.client()
        path = directory / f"{config['name']}.yaml"
        path.write_text(yaml.safe_dump(config))
        created = master.det("experiment", "create", str(path), str(ROOT / "model_defs" / definition))
        assert created.returncode == 0, created.stdout + created.stderr
        found = re.search(r"Created experiment (\d+)", created.stdout)
        assert found is not None, created.stdout
        self.experiment = f"/api/v1/experiments/{found[1]}"

    def trial_id(self) -> int:
        (trial,) = self._client.get(f"{self.experiment}/trials")["trials"]
        return int(trial["id"])

    def reports(self, group: str) -> list[tuple[int, dict[str, Any]]]:
        if not self._client.get(f"{self.experiment}/trials")["trials"]:
            return []
        path = f"/api/v1/trials/metrics/trial_metrics?group={group}&trialIds={self.trial_id()}"
        return [
            (int(report["totalBatches"]), values_in(report["metrics"]))
            for line in self._client.stream(path)
            for report in line["metrics"]
        ]

    def log(self) -> str:
        lines = self._client.stream(f"/api/v1/trials/{self.trial_id()}/logs")
        return "".join(line["message"] for line in lines)

    def pause_after_reports(self, num_reports: int) -> None:
        self._wait(lambda: len(self.reports("training")) >= num_reports)
        self._client.post(f"{self.experiment}/pause", {})
        # The experiment is paused at once, but its trial only after it has stored a checkpoint.
        self._wait(lambda: self._state() == "PAUSED" and self.checkpoint_paths())

    def activate(self) -> None:
        self._client.post(f"{self.experiment}/activate", {})

    def wait_for_completion(self) -> None:
        self._wait(lambda: self._state() == "COMPLETED")

    def checkpoint_paths(self) -> list[Path]:
        """Return the directories of the checkpoints, ordered by step."""
        found = self._client.get(f"{self.experiment}/checkpoints")["checkpoints"]
        found = [checkpoint for checkpoint in found if checkpoint["state"] == "STATE_COMPLETED"]
        found.sort(key=lambda checkpoint: checkpoint["metadata"]["steps_completed"])
        return [self._master.state.path / "checkpoints" / checkpoint["uuid"] for checkpoint in found]

    def _state(self) -> str:
        return str(self._client.get(self.experiment)["experiment"]["state"]).removeprefix("STATE_")

    def _wait(self, condition: Callable[[], object]) -> None:
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._state() not in ("ERROR", "CANCELED"), self.log()
            assert time.monotonic() < give_up_at_s, self.log()
            time.sleep(0.1)


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "experiment_configs" / f"{name}.yaml").read_text())
    return {**config, **changes, "max_restarts": 0}


def with_arguments(config: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    entrypoint = config["entrypoint"]
    for name, value in arguments.items():
        entrypoint, num_changed = re.subn(rf"--{name} \S+", f"--{name} {value}", entrypoint)
        assert num_changed == 1, name
    return {**config, "entrypoint": entrypoint}


def test_vision_transformer_resumes_after_pause_without_gaps(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    num_steps = 160
    config = shipped("hf_image")
    config = with_arguments(config, max_steps=num_steps, logging_steps=1, eval_steps=80, save_steps=80)
    config["searcher"]["max_length"] = {"batches": num_steps}
    trial = RunningTrial(shared_master, config, "hf_image", tmp_path)

    trial.pause_after_reports(3)
    paused_at = len(trial.reports("training"))
    trial.activate()
    trial.wait_for_completion()

    reports = trial.reports("training")
    assert 3 <= paused_at < num_steps
    assert [step for step, _ in reports] == list(range(1, num_steps + 1))
    losses = [metrics["loss"] for _, metrics in reports]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    evaluations = dict(trial.reports("validation"))
    assert list(evaluations) == [80, 160]
    assert evaluations[160]["eval_accuracy"] > 0.5
    # DeepSpeed's own scheduler, whose keys are "auto", continues after the pause.
    rates = [metrics["learning_rate"] for _, metrics in reports]
    assert max(rates) == pytest.approx(2e-3, rel=0.05)
    assert rates[-1] < 1e-4


def test_zero3_generation_after_pause_matches_whole_model(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    num_prompts, num_chars, num_new_tokens = 81, 80, 12
    definition = ROOT / "model_defs" / "hf_generate"
    expected_path, model_dir = tmp_path / "expected.json", tmp_path / "model"
    words = [definition, model_dir, expected_path, num_prompts, num_chars, num_new_tokens]
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generate_alone.py")), *map(str, words)],
        check=True,
        timeout=DEADLINE_S,
    )
    config = shipped("hf_generate")
    config["hyperparameters"] |= {
        "model": str(model_dir),
        "num_prompts": num_prompts,
        "num_prompt_chars_max": num_chars,
        "num_new_tokens": num_new_tokens,
        "batch_size": 2,
    }
    trial = RunningTrial(shared_master, config, "hf_generate", tmp_path)

    trial.pause_after_reports(1)
    (paused,) = trial.checkpoint_paths()
    first = (paused / "outputs.jsonl").read_text().splitlines()
    trial.activate()
    trial.wait_for_completion()

    last = (trial.checkpoint_paths()[-1] / "outputs.jsonl").read_text().splitlines()
    assert 0 < len(first) < num_prompts
    # Each prompt is generated once; the outputs from before the pause are kept.
    steps = [step for step, _ in trial.reports("training")]
    assert sorted(set(steps)) == steps
    assert set(first) <= set(last)
    assert dict(trial.reports("validation"))[num_prompts]["num_outputs"] == num_prompts
    outputs = [json.loads(line) for line in last]
    assert [output["prompt_idx"] for output in outputs] == list(range(num_prompts))
    assert [[output["prompt"], output["output"]] for output in outputs] == json.loads(
        expected_path.read_text()
    )
    assert len({len(output["prompt"]) for output in outputs}) > 10
    log = trial.log()
    table = re.findall(r"\b([01]) +cpu +[\d,]+ +[\d.]+ +([\d.]+)%", log)
    assert [rank for rank, _ in table[:2]] == ["0", "1"], log
    assert all(49 < float(share) < 52 for _, share in table)
