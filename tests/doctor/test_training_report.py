"""The catalogue of training checks, how an end is judged, and the report: without processes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import dstrial.doctor.training as training
from dstrial.doctor.training.check import CHECKS, Check, Status, chosen
from dstrial.doctor.training.checks.precision import problem_of
from dstrial.doctor.training.processes import Ended
from dstrial.doctor.training.report import markdown
from dstrial.doctor.training.runner import check_environment, judge

CHECK = Check("one", "title", "nowhere", 5, 60)


def test_every_check_has_a_docstring_that_says_what_it_shows() -> None:
    places = [check.module.partition(":")[::2] for check in CHECKS]
    assert len(set(places)) == len(CHECKS)
    for module, function in places:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        assert ast.get_docstring(tree), module
        (found,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == (function or "run")
        )
        assert ast.get_docstring(found), function
    modules = {path.stem for path in (Path(training.__file__).parent / "checks").glob("[!_]*.py")}
    assert modules == {module.rpartition(".")[2] for module, _ in places}


def test_names_are_unique_and_each_check_may_take_longer_than_it_needs() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.needs_s < check.deadline_s for check in CHECKS)
    assert chosen((), ()) == CHECKS
    assert [check.name for check in chosen(("save",), ())] == ["environment", "save"]


def test_an_answer_that_came_before_the_deadline_counts_however_the_process_ended() -> None:
    ended = Ended(exit_code=-9, is_late=True, seconds=60, num_left=0)
    found = judge(CHECK, ended, {"status": "ok", "summary": "fine"}, 60, "noise")
    assert (found.status, found.summary, found.output) == (Status.OK, "fine", "")


@pytest.mark.parametrize(
    "answer", [{}, {"status": "splendid", "summary": "x"}, {"status": "ok"}, {"status": []}]
)
def test_what_is_no_answer_does_not_count(answer: dict[str, Any]) -> None:
    found = judge(CHECK, Ended(3, False, 1.0, 0), answer, 60, "the end", "work")
    assert found.status is Status.FAILED
    assert found.summary == "its process ended with exit code 3 and without an answer, at work"
    assert found.output == "the end"


def test_the_deadline_is_a_failure_and_the_end_of_the_minutes_is_none() -> None:
    ended = Ended(-9, True, 20.0, 4)
    assert judge(CHECK, ended, {}, 60, "").status is Status.FAILED
    assert judge(CHECK, ended, {}, 20, "").status is Status.NOT_REACHED


def test_fp16_has_to_overflow_skip_and_halve() -> None:
    good = {"result": "finite", "scales": [2.0**31, 2.0**30], "skipped": 2}
    assert problem_of(good) == ""
    assert "no step was skipped" in problem_of({**good, "skipped": 0})
    assert "still" in problem_of({**good, "scales": [2.0**32]})
    assert problem_of({"result": "a loss is not finite"}) == "a loss is not finite"
    assert problem_of({}) == "it has no result"
    assert problem_of({"result": "not supported by this device"}) == ""
    assert problem_of({"result": "refused before training"}) == ""


def test_checks_see_no_rank_no_run_and_no_relative_path() -> None:
    made = check_environment(
        {"RANK": "1", "DSTRIAL_RUN_DIR": "x", "DET_MASTER": "y", "HOME": "/h", "PYTHONPATH": "lib:/abs"}
    )
    assert made["HOME"] == "/h"
    assert not {"RANK", "DSTRIAL_RUN_DIR", "DET_MASTER"} & set(made)
    paths = made["PYTHONPATH"].split(":")
    assert Path(paths[0], "dstrial", "doctor").is_dir()
    assert paths[1:] == [str(Path.cwd() / "lib"), "/abs"]


def test_the_report_tells_results_failures_what_was_not_shown_and_figures() -> None:
    common = {"advice": "", "not_shown": "", "facts": {}, "output": "", "deadline_s": 60.0}
    value = {
        "minutes": 8,
        "began_at": "then",
        "planned": ["a", "b", "c"],
        "environment": {"torch": "2.11"},
        "counts": {"ok": 1, "failed": 1, "not applicable": 0},
        "checks": [
            {
                **common,
                "name": "a",
                "title": "A",
                "status": "ok",
                "summary": "x | y",
                "seconds": 1.5,
                "not_shown": "half",
            },
            {
                **common,
                "name": "b",
                "title": "B",
                "status": "failed",
                "summary": "broken",
                "seconds": 2.0,
                "advice": "Mend it.",
                "output": "line ```",
                "facts": {"rate": 0.123456789, "rows": [{"k": 1}, {"k": 2, "l": True}]},
            },
        ],
    }
    text = markdown(value)
    assert "1 ok, 1 failed; 4 s of 8 minutes, begun at then. 1 of 3 are still to come." in text
    assert "| a | ok | 1.5 | x \\| y |" in text
    assert "To do: Mend it." in text
    assert "- a: half" in text
    assert "| torch | 2.11 |" in text
    assert "| rate | 0.123457 |" in text
    assert "| k | l |\n|---|---|\n| 1 |  |\n| 2 | yes |" in text
    assert text.count("```") == 2
