"""The checkpoint benchmark runs and prints both of its tables, on a model of a few thousand parameters."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.ranks


def program() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
    spec = importlib.util.spec_from_file_location("checkpoint_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_tables_are_printed_with_a_ratio_to_their_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = program()
    monkeypatch.setattr(benchmark, "RESHAPES", ((1, 0, 1, 3),))
    out = tmp_path / "out.json"
    benchmark.main(["--size", "0.01", "--saves", "2", "--scratch", str(tmp_path), "--out", str(out)])
    measured = json.loads(out.read_text())
    saving, (reshape,) = measured["saving"], measured["reshaping"]
    assert len(saving["held_s"]) == len(saving["bare_s"]) == len(saving["determined_s"]) == 2
    assert saving["num_bytes"] > 3 * 4 * 10_000
    assert reshape["num_bytes"] > 3 * 4 * 10_000
    printed = capsys.readouterr().out
    assert "| bare engine.save_checkpoint |" in printed
    assert "| dstrial, behind the loop |" in printed
    assert "| 1 ranks, ZeRO 0 | 1 ranks, ZeRO 3 |" in printed
    assert list(tmp_path.iterdir()) == [out]
