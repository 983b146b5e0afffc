"""A ``predict`` search on a master and the ``plan`` command, with real DeepSpeed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from searching import CONFIG, begun, command, events, run
from waiting import wait_for

from dstrial.testing.master import MasterForTest

DEADLINE_S = 900

pytestmark = pytest.mark.timeout(1200)


def shallow(directory: Path, name: str) -> Path:
    """Write the config of a net with one hidden layer, which halves dry-run time."""
    config = directory / "exp.yaml"
    config.write_text(
        CONFIG.read_text().replace("name: dsat_trial", f"name: {name}").replace("depth: 4", "depth: 1")
    )
    return config


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """A finished search; ``so_far`` is its page while the second trial was running."""

    output: Path
    words: list[str]
    printed: str
    so_far: dict[str, Any]

    def shown(self, master: MasterForTest) -> dict[str, Any]:
        return shown(master, self.output)


def shown(master: MasterForTest, output: Path) -> dict[str, Any]:
    search_id = json.loads((output / "search.json").read_text())["search_id"]
    found: dict[str, Any] = master.client().get(f"/page/searches/{search_id}")
    return found


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory, shared_master: MasterForTest) -> Search:
    directory = tmp_path_factory.mktemp("search")
    output, log = directory / "out", directory / "log"
    config = shallow(directory, "predict on a master")
    flags = ("--metric", "throughput", "--measure-seconds", "1", "--max-trials", "2", "-z", "0")
    words = command("predict", output, *flags, config=config)
    running = begun(words, log, shared_master.env)

    def is_so_far() -> bool:
        assert running.poll() is None, log.read_text()
        return len(events(output, "submitted")) == 2 and [
            row["state"] for row in shown(shared_master, output)["trials"]
        ] == ["measured", "running"]

    wait_for(is_so_far, "the second trial is not running", deadline_s=DEADLINE_S)
    so_far = shown(shared_master, output)
    assert running.wait(DEADLINE_S) == 0, log.read_text()
    return Search(output, words, log.read_text(), so_far)


@pytest.mark.ranks
def test_predict_records_inputs_and_machine(search: Search, shared_master: MasterForTest) -> None:
    output = search.output
    described = "described by fake tensors (1 of 1 kinds of graphs; of a loader's first batches the largest)"
    assert described.replace("by ", "by:  ", 1) in search.printed
    notes = json.loads((output / "report.json").read_text())["notes"]
    assert described in notes
    (inputs,) = events(output, "inputs")
    assert inputs["is_cpu"]
    assert not inputs["failures"]
    # Stage 0 and the user's own stage 1, with and without accumulation.
    assert len(inputs["runs"]) == 4
    own, *others = events(output, "result")
    assert own["metrics"]["machine_flops_per_s"] > 1e8
    assert own["metrics"]["machine_all_reduce_latency_s"] > 0
    assert len(others) <= 1
    report = json.loads((output / "report.json").read_text())
    assert report["trials"][0]["predicted"]["memory_bytes"] > 0
    again = run(search.words, shared_master.env)
    assert again.stdout.count("begins") == again.stdout.count("describe:") == 0
    assert len(events(output, "inputs")) == 1


@pytest.mark.ranks
def test_page_shows_running_and_finished_search(search: Search, shared_master: MasterForTest) -> None:
    so_far = search.so_far
    assert so_far["search"]["state"] == "RUNNING"
    assert not so_far["report"]["is_finished"]
    assert (so_far["report"]["best"], so_far["report"]["pareto"]) == (1, [1])
    own, second = so_far["trials"]
    assert own["throughput"] > 0
    assert second["predicted"]["step_s"] > 0
    number = events(search.output, "submitted")[0]["handle"]["experiment_id"]
    assert {row["experiment"] for row in so_far["trials"]} == {number}

    ended = search.shown(shared_master)
    assert ended["search"]["state"] == "COMPLETED"
    assert ended["report"]["is_finished"]
    assert [row["state"] for row in ended["trials"]] == ["measured", "measured"]
    assert ended["trials"][1]["predicted"]["step_s"] == second["predicted"]["step_s"]


@pytest.mark.process
def test_plan_command_prints_and_writes_report(tmp_path: Path) -> None:
    # Fixing these two values halves the number of dry runs.
    space = tmp_path / "space.yaml"
    space.write_text(
        "zero_optimization.overlap_comm: [false]\nzero_optimization.offload_optimizer.device: [cpu]\n"
    )
    flags = ("--slots", "4,8", "--device", "h100", "--price", "2.5", "-z", "3", "--space", str(space))

    planned = run(command("plan", tmp_path, *flags, config=shallow(tmp_path, "planned")))

    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "not measured" in planned.stdout
    assert "NVIDIA H100 datasheet" in planned.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_measured"] is False
    assert report["slots"] == [4, 8]
    assert {row["num_slots"] for row in report["rows"]} == {4, 8}
    assert all(row["mfu"] > 0 and row["epoch_cost"] > 0 for row in report["rows"])
    assert report["device_memory_bytes"] == 80 * 2**30
    stages = {row["candidate"]["stage"] for row in report["rows"]}
    assert stages == {1, 3}
    offloaded = [row for row in report["rows"] if "offload_param.device=cpu" in row["description"]]
    assert all(row["host_bytes"] > 0 and row["fits"] and row["margin_bytes"] > 0 for row in offloaded)
