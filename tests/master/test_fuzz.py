"""Fuzzing of the master's HTTP API."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import Fuzzer, database_problems, hostile_requests
from serving import serving

pytestmark = pytest.mark.process


def test_mutated_requests_are_answered_without_database_damage(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as master:
        report = Fuzzer(master, seed=7).run(1200)
    assert not report.failures, "\n".join(report.failures[:10])
    assert report.statuses[200] > 100
    assert report.statuses[400] > 20


def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as master:
        found = hostile_requests(master)
        assert database_problems(master) == []
        assert not list(Path(tmp_path).rglob("*owned*"))
    assert {what: status for what, status in found.items() if not 400 <= status < 500} == {}
    assert len(found) > 20
