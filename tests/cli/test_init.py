"""``dstrial init`` and its projects; ``dstrial kill`` and ``dstrial show``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dstrial.cli import experiments
from dstrial.cli.app import main
from dstrial.testing.master import MasterForTest

TEMPLATES = ["trial", "pipeline", "trainer", "accelerate"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_project_of_template_passes_check(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "new"), "--template", template]) == 0
    assert main(["check", str(tmp_path / "new" / "exp.yaml"), str(tmp_path / "new")]) == 0

    assert "dstrial run exp.yaml ." in capsys.readouterr().out


def test_init_refuses_to_overwrite_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "exp.yaml").write_text("mine")

    assert main(["init", str(tmp_path)]) == 1

    assert "already has exp.yaml" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["exp.yaml"]
    assert (tmp_path / "exp.yaml").read_text() == "mine"


@pytest.mark.ranks
@pytest.mark.parametrize("template", TEMPLATES)
def test_project_of_template_trains_and_is_listed(
    template: str, tmp_path: Path, shared_master: MasterForTest
) -> None:
    project = tmp_path / template
    assert main(["init", str(project), "--template", template]) == 0
    config = (project / "exp.yaml").read_text()
    (project / "exp.yaml").write_text(config.replace("{epochs: 5}", "{batches: 128}"))

    trained = shared_master.dstrial(
        "run", str(project / "exp.yaml"), str(project), "--runs-dir", str(tmp_path / "runs"), deadline_s=200
    )
    listed = json.loads(shared_master.dstrial("list", "--json").stdout)
    shown = shared_master.dstrial("show", str(listed[0]["id"]))

    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert listed[0]["state"] == "STATE_COMPLETED"
    assert listed[0]["name"] in shown.stdout


@pytest.mark.process
def test_kill_ends_experiment_of_master(tmp_path: Path, shared_master: MasterForTest) -> None:
    (tmp_path / "exp.yaml").write_text(
        "name: sleeper\nentrypoint: sleep 100\nsearcher: {name: single, metric: loss}\n"
    )
    created = shared_master.det("e", "create", str(tmp_path / "exp.yaml"), str(tmp_path))
    assert created.returncode == 0, created.stderr
    (one,) = [
        one for one in json.loads(shared_master.dstrial("list", "--json").stdout) if one["name"] == "sleeper"
    ]

    killed = shared_master.dstrial("kill", str(one["id"]))
    shared_master.det("e", "wait", str(one["id"]))
    again = shared_master.dstrial("kill", "98765", str(one["id"]))

    assert killed.stdout == f"experiment {one['id']}: killed\n"
    assert "canceled" in shared_master.dstrial("list").stdout
    unknown = "experiment 98765 is not found; expected one of `dstrial list --all`.\n"
    assert (again.returncode, again.stderr) == (1, unknown)
    assert again.stdout == f"experiment {one['id']}: already canceled\n"


@pytest.mark.process
def test_show_counts_omitted_trials_and_names_searched_values(
    tmp_path: Path,
    shared_master: MasterForTest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "exp.yaml").write_text(
        "name: shown\nentrypoint: 'true'\nsearcher: {name: grid, metric: loss}\n"
        "hyperparameters: {width: 32, model: {depth: {type: categorical, vals: [3, 3]}}}\n"
    )
    created = shared_master.det("e", "create", str(tmp_path / "exp.yaml"), str(tmp_path))
    assert created.returncode == 0, created.stderr
    experiment_id = re.findall(r"\d+", created.stdout)[-1]
    shared_master.det("e", "wait", experiment_id)
    monkeypatch.setattr(experiments, "_TRIALS_SHOWN", 1)
    show = ["show", experiment_id, "--state-dir", str(shared_master.state.path)]

    assert main(show) == 0
    text = capsys.readouterr().out
    assert main([*show, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]

    assert "1 of 2 trials; --json prints all" in text
    assert "model.depth=3" in text
    assert "width" not in text
    assert len(trials) == 2
