"""Every shipped experiment config trains, checkpoints and resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "experiment_configs").glob("*.yaml"))
RUN_TIMEOUT_S = 280


def is_search(config: Path) -> bool:
    return yaml.safe_load(config.read_text())["searcher"]["name"] != "single"


def is_script(config: Path) -> bool:
    """Return whether the config runs a script; tests/integrations covers those."""
    return "--trial" not in yaml.safe_load(config.read_text())["entrypoint"]


SCRIPTS = [config for config in CONFIGS if is_script(config)]
SEARCHES = [config for config in CONFIGS if is_search(config) and config not in SCRIPTS]


def context_dir_of(config: Path) -> Path:
    """Return the model definition whose name is the longest prefix of the config's."""
    names = [path.name for path in (ROOT / "model_defs").iterdir() if config.stem.startswith(path.name)]
    return ROOT / "model_defs" / max(names, key=len)


def environment(runs_dir: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "PYTHONPATH")}
    return {**kept, "OMP_NUM_THREADS": "1", "DSTRIAL_RUNS_DIR": str(runs_dir)}


def dstrial(*arguments: str, runs_dir: Path) -> str:
    """Run the installed ``dstrial`` command from outside the checkout; return what it printed."""
    command = [str(Path(sys.executable).with_name("dstrial")), *arguments]
    runs_dir.mkdir(parents=True, exist_ok=True)
    finished = subprocess.run(
        command,
        cwd=runs_dir,
        env=environment(runs_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, f"{command} exited {finished.returncode}:\n{finished.stdout}"
    return finished.stdout


@pytest.fixture
def _master(shared_master: MasterForTest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSTRIAL_STATE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, shared_master.env[name])


def overwrites(values: dict[str, Any]) -> list[str]:
    return [
        argument for key, value in values.items() for argument in ("--config", f"{key}={json.dumps(value)}")
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The record and the reports of a run directory."""

    path: Path
    record: dict[str, Any]
    reports: list[dict[str, Any]]

    @classmethod
    def only_one_in(cls, runs_dir: Path) -> Outcome:
        (record_path,) = runs_dir.glob("*/*/run.json")
        lines = (record_path.parent / "metrics.jsonl").read_text().splitlines()
        reports = [report for line in lines if (report := json.loads(line))["group"] != "telemetry"]
        return cls(record_path.parent, json.loads(record_path.read_text()), reports)

    def batches_of(self, group: str) -> list[int]:
        return [report["steps_completed"] for report in self.reports if report["group"] == group]

    def values_of(self, group: str, metric: str) -> list[float]:
        return [report["metrics"][metric] for report in self.reports if report["group"] == group]

    def num_complete_checkpoints(self) -> int:
        return len(list(self.path.glob("checkpoints/*/COMPLETE")))

    def num_superseded_reports(self) -> int:
        path = self.path / "metrics.superseded.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


def test_every_model_definition_has_config() -> None:
    assert {context_dir_of(config) for config in CONFIGS} == {
        path for path in (ROOT / "model_defs").iterdir() if path.is_dir()
    }


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
@pytest.mark.parametrize(
    "config",
    [config for config in CONFIGS if config not in SEARCHES + SCRIPTS],
    ids=lambda config: config.stem,
)
def test_shipped_config_trains_checkpoints_and_resumes(config: Path, tmp_path: Path) -> None:
    if config.stem == "lora_clm":
        pytest.importorskip("peft")
    searcher = yaml.safe_load(config.read_text())["searcher"]
    periods = {
        "scheduling_unit": 2,
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"batches": 4},
    }
    command = ["run", str(config), str(context_dir_of(config))]

    dstrial(*command, *overwrites({**periods, "searcher.max_length": {"batches": 6}}), runs_dir=tmp_path)
    first = Outcome.only_one_in(tmp_path)
    dstrial(
        *command,
        *overwrites({**periods, "searcher.max_length": {"batches": 10}}),
        "--resume",
        "latest",
        runs_dir=tmp_path,
    )
    second = Outcome.only_one_in(tmp_path)

    assert first.record["state"] == second.record["state"] == "completed"
    assert (first.record["num_attempts"], second.record["num_attempts"]) == (1, 2)
    assert first.batches_of("training") == [2, 4, 6]
    assert first.batches_of("validation") == [3, 6]
    assert first.num_complete_checkpoints() >= 1
    # Had the second run begun anew, or before batch 6, there would be repeated or superseded reports.
    assert second.batches_of("training") == [2, 4, 6, 8, 10]
    assert second.batches_of("validation") == [3, 6, 9, 10]
    assert second.num_superseded_reports() == 0
    assert second.reports[: len(first.reports)] == first.reports
    for report in second.reports:
        assert all(math.isfinite(value) for value in report["metrics"].values()), report
    assert all(
        any(name.endswith("loss") for name in report["metrics"])
        for report in second.reports
        if report["group"] == "training"
    )
    assert len(second.values_of("validation", searcher["metric"])) == 4


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
@pytest.mark.parametrize("config", SEARCHES, ids=lambda config: config.stem)
def test_shipped_search_runs_trials_and_names_best(config: Path, tmp_path: Path) -> None:
    printed = dstrial(
        "run",
        str(config),
        str(context_dir_of(config)),
        *overwrites({"searcher.max_trials": 3, "searcher.max_time": 2}),
        runs_dir=tmp_path,
    )

    table = printed[printed.index("\ntrial  state") :].splitlines()[1:]
    assert len([line for line in table if line[:1].isdigit()]) == 3
    assert "warmup_max_lr=" in table[1]
    assert re.search(r"state: +completed\nbest: +validation_accuracy 0\.\d+ of trial \d+\n", printed)
    (record_path,) = tmp_path.glob("*/*/run.json")
    assert json.loads(record_path.read_text())["state"] == "completed"


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
def test_digits_reach_accuracy_of_readme(tmp_path: Path) -> None:
    readme = (ROOT / "model_defs" / "digits" / "README.md").read_text()
    promised = re.search(r"at least (\d+) % validation accuracy", readme)
    assert promised is not None

    dstrial(
        "run",
        str(ROOT / "experiment_configs" / "digits.yaml"),
        str(ROOT / "model_defs" / "digits"),
        runs_dir=tmp_path,
    )

    accuracies = Outcome.only_one_in(tmp_path).values_of("validation", "validation_accuracy")
    assert len(accuracies) == 15
    assert accuracies[-1] >= int(promised[1]) / 100


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
def test_pipeline_stages_train_on_same_records(tmp_path: Path) -> None:
    # The first stage reads characters, the last one the characters that follow. Without the right
    # pairing nothing better can be learned than how frequent each character is: 4.5 bits.
    dstrial(
        "run",
        str(ROOT / "experiment_configs" / "stdlib_lm.yaml"),
        str(ROOT / "model_defs" / "stdlib_lm"),
        *overwrites({"searcher.max_length": {"batches": 100}, "hyperparameters.num_validation_blocks": 99}),
        runs_dir=tmp_path,
    )

    (bits_per_char,) = Outcome.only_one_in(tmp_path).values_of("validation", "bits_per_char")
    assert bits_per_char < 4.0
