"""Which requests of dry runs are repeated, and what is said of one without an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrial.engine.dryrun import __main__ as program
from dstrial.engine.dryrun.process import DryRunError, _answer
from dstrial.engine.dryrun.values import DryRunRequest


def test_main_repeats_unanswered_requests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for idx in range(2):
        asked, answered = tmp_path / f"request-{idx}.json", tmp_path / f"answer-{idx}.json"
        asked.write_text(json.dumps(DryRunRequest("module:name", {"idx": idx}, {}, 1).to_json()))
        paths += [str(asked), str(answered)]
    Path(paths[1]).touch()
    calls: list[Any] = []
    monkeypatch.setattr(program, "importlib", SimpleNamespace(import_module=lambda _name: None))
    monkeypatch.setattr(program, "_fork", lambda _call: 1)
    monkeypatch.setattr(program, "_has_failed", lambda _child: True)
    monkeypatch.setattr(program, "_run_all", lambda given, _num_parallel: calls.extend(given))

    program.main(2, paths)

    assert [call.args[1] for call in calls] == [Path(paths[3])]


def test_dry_run_without_answer_names_exit_code(tmp_path: Path) -> None:
    error = _answer(tmp_path / "answer-0.json", False, 1.0, -9, "")

    assert isinstance(error, DryRunError)
    assert error.kind == "died"
    assert "exit code -9" in str(error)
