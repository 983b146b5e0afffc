"""``dstrial checkpoint diff`` on real checkpoints of different steps and layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.ranks

Command = Callable[..., tuple[int, str, str]]


def run_diff(command: Command, *words: object) -> tuple[int, dict[str, Any]]:
    exit_code, out, err = command("checkpoint", "diff", *words, "--json")
    assert err == ""
    return exit_code, json.loads(out)


@pytest.mark.parametrize("case", ["zero 3", "two engines", "pipeline"])
def test_diff_with_itself_finds_no_difference(checkpoints: Any, dstrial_command: Command, case: str) -> None:
    path = checkpoints[case].latest
    exit_code, report = run_diff(dstrial_command, path, path, "--optimizer")
    assert (exit_code, report["is_same"], report["differences"]) == (0, True, {})
    assert [part["num_differing"] for part in report["weights"]] == [0] * len(report["weights"])
    assert dstrial_command("checkpoint", "diff", path, path)[1].endswith("the two are the same\n")


def test_diff_between_zero_stages_shows_config_and_layout(checkpoints: Any, dstrial_command: Command) -> None:
    a, b = checkpoints["zero 0"].latest, checkpoints["zero 3"].latest
    exit_code, report = run_diff(dstrial_command, a, b)
    assert exit_code == 1
    assert report["differences"]["hyperparameters"] == [
        {"key": "deepspeed_config.zero_optimization.stage", "a": 0, "b": 3}
    ]
    assert {"key": "zero_stage", "a": 0, "b": 3} in report["differences"]["layout of engine 0"]
    assert not {"progress", "optimizer of engine 0", "parameters of engine 0"} & report["differences"].keys()


def test_diff_of_weights_only_ignores_layout(checkpoints: Any, dstrial_command: Command) -> None:
    a, b = checkpoints["zero 2"].latest, checkpoints["zero 3"].latest
    exit_code, report = run_diff(dstrial_command, a, b, "--only", "weights", "--optimizer")
    assert (exit_code == 0) == (report["weights"][0]["num_elements_differing"] == 0)
    assert report["weights"][0]["relative"] < 1e-6


def test_diff_norms_match_exported_weights(
    checkpoints: Any, dstrial_command: Command, tmp_path: Path
) -> None:
    made = checkpoints["zero 3"]
    earlier, latest = tmp_path / "earlier.pt", tmp_path / "latest.pt"
    for path, output in ((made.earlier, earlier), (made.latest, latest)):
        assert dstrial_command("checkpoint", "export", path, output, "--format", "torch")[0] == 0
    a, b = torch.load(earlier), torch.load(latest)
    exit_code, report = run_diff(dstrial_command, made.earlier, made.latest, "--top", "100")
    assert exit_code == 1
    (weights,) = report["weights"]
    rows = {row["name"]: row for row in weights["largest"]}
    changed = {
        name
        for name in a
        if a[name].is_floating_point() and not torch.equal(a[name], b[name]) and "norm" not in name
    }
    assert rows.keys() == changed - {"unembed.weight"}
    for name, row in rows.items():
        difference = (a[name].double() - b[name].double()).norm().item()
        assert row["norm_difference"] == pytest.approx(difference, rel=1e-12)
        assert row["norm_a"] == pytest.approx(a[name].double().norm().item(), rel=1e-12)
        assert row["relative"] == pytest.approx(difference / max(row["norm_a"], row["norm_b"]), rel=1e-12)
        assert row["num_differing"] == int((a[name] != b[name]).sum())
    total = math.sqrt(sum(row["norm_difference"] ** 2 for row in rows.values()))
    assert weights["norm_difference"] == pytest.approx(total, rel=1e-9)
    relatives = [row["relative"] for row in weights["largest"]]
    assert relatives == sorted(relatives, reverse=True)


def test_diff_of_progress_includes_steps_and_learning_rates(
    checkpoints: Any, dstrial_command: Command
) -> None:
    made = checkpoints["pipeline"]
    exit_code, report = run_diff(dstrial_command, made.earlier, made.latest, "--only", "progress")
    assert exit_code == 1
    assert report["differences"]["progress"] == [{"key": "steps_completed", "a": 2, "b": 3}]
    keys = {entry["key"] for entry in report["differences"]["optimizer of engine 0"]}
    assert {"steps", "global_steps", "groups.0.lr", "lr_scheduler.last_batch_iteration"} <= keys
    assert report["weights"] == []


def test_diff_compares_moments_only_with_optimizer_option(checkpoints: Any, dstrial_command: Command) -> None:
    made = checkpoints["bf16"]
    plain = run_diff(dstrial_command, made.earlier, made.latest)[1]["weights"][0]
    more = run_diff(dstrial_command, made.earlier, made.latest, "--optimizer", "--top", "99")[1]["weights"][0]
    assert (plain["num_compared"], more["num_compared"]) == (7, 7 + 2 * 5)
    assert {row["key"] for row in more["largest"]} == {"master", "exp_avg", "exp_avg_sq"}
    assert more["norm_difference"] == plain["norm_difference"], "of weights alone"


def test_diff_of_different_models_is_no_error(checkpoints: Any, dstrial_command: Command) -> None:
    exit_code, report = run_diff(
        dstrial_command, checkpoints["zero 2"].latest, checkpoints["pipeline"].latest
    )
    assert exit_code == 1
    gone = {"key": "head.weight", "a": "4x13 float32", "b": "absent"}
    assert gone in report["differences"]["parameters of engine 0"]
    assert report["weights"][0]["num_compared"] == 0


def test_diff_text_lists_largest_differences(checkpoints: Any, dstrial_command: Command) -> None:
    made = checkpoints["zero 2"]
    exit_code, out, _ = dstrial_command("checkpoint", "diff", made.earlier, made.latest, "--top", "2")
    assert exit_code == 1
    assert "steps_completed: 2 -> 3" in out
    assert "weights of engine 0: 5 of 7 tensors differ, in 272 of 454 elements" in out
    assert "the 2 largest:" in out
    assert len(out.split("the 2 largest:\n")[1].splitlines()) == 3


def test_diff_failure_exits_2(checkpoints: Any, dstrial_command: Command, tmp_path: Path) -> None:
    spread = checkpoints["spread experts"]
    for a, b, message in (
        (spread.latest, tmp_path / "no", "expected the directory of a checkpoint"),
        (spread.earlier, spread.latest, "its experts are spread over 2 ranks"),
    ):
        exit_code, out, err = dstrial_command("checkpoint", "diff", a, b)
        assert (exit_code, out) == (2, "")
        assert message in err
