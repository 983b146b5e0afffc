"""Each logger stores exactly the metrics of the run's own record."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import pytest
import stores
from small_runs import DEFINITIONS, Run, deepspeed_config, experiment, train
from waiting import wait_for

from dstrial.config.secrets import MASK
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.loggers, pytest.mark.ranks, pytest.mark.timeout(600)]

ALL = ["wandb", "mlflow"]


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide API keys, and let loggers store runs in the test's directory."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def config_of(loggers: list[Any] | None = None, batches: int = 16, **hparams: Any) -> dict[str, Any]:
    return experiment(
        {
            "deepspeed_config": deepspeed_config(),
            "lr": 0.01,
            "nested": {"depth": 2},
            "hf_token": "xyzzy",
            **hparams,
        },
        batches=batches,
        report=2,
        validate=8,
        checkpoint=5,
        data={"dstrial": {"loggers": ALL if loggers is None else loggers}},
    )


def entries(rows: Any) -> collections.Counter[tuple[int, str, str]]:
    """Count (step, metric name, value) entries, however rows are divided."""
    found: collections.Counter[tuple[int, str, str]] = collections.Counter()
    for step, metrics in rows:
        for name, value in metrics.items():
            is_number = isinstance(value, int | float)  # telemetry also has lists
            if name.startswith(("training/", "validation/", "telemetry/")) and is_number:
                found[step, name, repr(float(value))] += 1
    return found


def recorded(run: Run, *, with_superseded: bool = True) -> collections.Counter[tuple[int, str, str]]:
    """Return ``entries`` of the run's record, with metrics superseded by a resume."""
    paths = [run.directory.metrics_path]
    if with_superseded and run.directory.superseded_metrics_path.exists():
        paths.append(run.directory.superseded_metrics_path)
    rows = []
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            added = ("batches", "epochs") if row["group"] == "validation" else ()  # loggers do not get these
            metrics = {
                f"{row['group']}/{name}": value for name, value in row["metrics"].items() if name not in added
            }
            rows.append((row["steps_completed"], metrics))
    return entries(rows)


def newest(rows: Any) -> dict[tuple[int, str], float]:
    return {(step, name): value for step, metrics in rows for name, value in metrics.items()}


def test_loggers_match_record_after_kill_and_resume(tmp_path: Path) -> None:
    env = {"KILL_AT": "1:13", "KILL_MARKER": str(tmp_path / "killed")}
    first = train(tmp_path, "DataParallelTrial", config_of(), ranks=2, env=env)
    assert first.returncode != 0, first.output
    again = train(tmp_path, "DataParallelTrial", config_of(), ranks=2, run=first, env=env)
    assert again.returncode == 0, again.output
    assert "resumed from checkpoint" in again.output
    assert again.output.count("there is no WANDB_API_KEY, so the run is stored on disk") == 1

    expected, final = recorded(again), recorded(again, with_superseded=False)
    assert {step for step, _, _ in final} == {2, 4, 6, 8, 10, 12, 14, 16}
    assert sum(expected.values()) > sum(final.values()), "batch 12 was trained twice"

    (run,) = stores.read("mlflow", f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    assert entries(run["rows"]) == expected
    assert (run["experiment"], run["status"]) == ("small", "FINISHED")
    assert run["tags"]["dstrial.state"] == "completed"
    assert run["params"]["lr"] == "0.01"
    assert run["params"]["nested.depth"] == "2"
    assert run["params"]["hf_token"] == MASK
    assert run["params"]["experiment.searcher.metric"] == "validation_loss"

    killed, resumed = stores.read("wandb", again.directory.path / "wandb")
    assert killed["id"] == resumed["id"]
    assert (killed["exit"], killed["summary"]["state"]) == (
        1,
        "failed",
    )  # the chief notices the killed rank
    assert entries([*killed["rows"], *resumed["rows"]]) == expected
    assert (resumed["project"], resumed["group"], resumed["name"]) == (
        "small",
        "small",
        again.directory.path.name,
    )
    assert resumed["config"]["lr"] == 0.01
    assert resumed["config"]["experiment"]["searcher"]["metric"] == "validation_loss"
    assert resumed["summary"]["state"] == "completed"
    assert resumed["exit"] == 0
    assert "xyzzy" not in killed["text"] + resumed["text"]

    for rows in (run["rows"], [*killed["rows"], *resumed["rows"]]):
        last = newest(rows)
        assert {(s, n, repr(float(last[s, n]))) for s, n, _ in final} == set(final), (
            "what was reported last counts"
        )
        assert last[16, "epochs"] == 4.0


def test_pipeline_is_logged_by_chief_only(tmp_path: Path) -> None:
    config = config_of(["mlflow"], batches=4)
    config["data"]["dstrial"]["pipeline_stages"] = 2
    run = train(tmp_path, "PipelineTrial", config, ranks=2)
    assert run.returncode == 0, run.output
    (kept,) = stores.read("mlflow", f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    assert entries(kept["rows"]) == recorded(run)


def test_loggers_do_not_change_training_metrics(tmp_path: Path) -> None:
    with_all = train(tmp_path / "with", "DataParallelTrial", config_of(batches=6))
    without = train(tmp_path / "without", "DataParallelTrial", config_of([], batches=6))
    assert with_all.reports("training") == without.reports("training")
    assert with_all.reports("validation") == without.reports("validation")


@pytest.mark.process
def test_trial_restart_keeps_logged_run_unlike_fork(shared_master: MasterForTest, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = {
        **config_of([{"mlflow": {"tracking_uri": uri, "experiment_name": "on a master"}}]),
        "entrypoint": "python3 -m dstrial.launch --trial small_trials:DataParallelTrial",
        "resources": {"slots_per_trial": 1},
        "max_restarts": 1,
        "environment": {"environment_variables": ["KILL_AT=0:13", f"KILL_MARKER={tmp_path / 'killed'}"]},
    }
    path = tmp_path / "exp.yaml"
    path.write_text(json.dumps(config))
    client = shared_master.client()

    def trial_of(*arguments: str) -> dict[str, Any]:
        created = shared_master.det("experiment", *arguments)
        assert created.returncode == 0, created.stdout + created.stderr
        experiment_id = int(created.stdout.split("Created experiment ")[1].split()[0])
        experiment = f"/api/v1/experiments/{experiment_id}"
        wait_for(lambda: client.get(experiment)["experiment"]["state"].endswith("COMPLETED"), deadline_s=300)
        (trial,) = client.get(f"{experiment}/trials")["trials"]
        return dict(trial)

    crashed = trial_of("create", str(path), str(DEFINITIONS))
    assert crashed["restarts"] == 1
    (run,) = stores.read("mlflow", uri)
    assert (run["name"], run["experiment"]) == (f"trial {crashed['id']}", "on a master")
    losses = {step for step, metrics in run["rows"] if "training/loss" in metrics}
    assert losses >= {12, 14, 16}  # reports queued when the chief was killed are lost
    reported = client.get(f"/api/v1/trials/{crashed['id']}")["trial"]["latestValidation"]["metrics"][
        "avgMetrics"
    ]
    assert newest(run["rows"])[16, "validation/validation_loss"] == reported["validation_loss"]

    path.write_text(json.dumps({**config, "name": "fork"}))
    forked = trial_of("create", str(path), str(DEFINITIONS))
    runs = stores.read("mlflow", uri)
    assert {one["name"] for one in runs} == {f"trial {crashed['id']}", f"trial {forked['id']}"}
    assert all(math.isfinite(value) for one in runs for value in newest(one["rows"]).values())
