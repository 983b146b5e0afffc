"""Reading, writing and repair of JSON and JSON Lines files."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
from rank_processes import names_in

from dstrial.errors import DstrialError, TrialContractError
from dstrial.local.json_files import (
    JsonLinesTail,
    append_json_line,
    metric_number,
    read_json,
    read_json_lines,
    repair_json_lines,
    to_strict_json,
    write_json_atomically,
)


def test_non_finite_numbers_round_trip_as_strings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_json_line(path, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5, "e": "a\nb"})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == read_json_lines(path)[0]
    assert row == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5, "e": "a\nb"}
    assert math.isnan(metric_number(row["a"]) or 0)
    assert metric_number(row["b"]) == math.inf
    assert metric_number(row["c"]) == -math.inf
    assert metric_number("fast") is None
    assert metric_number(True) is None


def test_to_strict_json_converts_numpy_values() -> None:
    value = {
        "loss": np.float32(0.5),
        "n": np.int64(3),
        "grid": np.array([[1.0, np.nan]]),
        7: (np.bool_(True), None),
    }
    assert to_strict_json(value, "metrics") == {
        "loss": 0.5,
        "n": 3,
        "grid": [[1.0, "NaN"]],
        "7": [True, None],
    }


def test_unserializable_value_error_names_its_path() -> None:
    with pytest.raises(TrialContractError, match=r"metrics\['a'\]\[1\] is .*of type set"):
        to_strict_json({"a": [1, {2}]}, "metrics")


def test_repair_json_lines_removes_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert [row["a"] for row in read_json_lines(path)] == [1, 2]
    assert repair_json_lines(path)
    append_json_line(path, {"a": 3})
    assert [row["a"] for row in read_json_lines(path)] == [1, 2, 3]
    path.write_text('{"a": 1}\n{"a": 2}')  # a complete last line without line break
    assert repair_json_lines(path)
    assert [row["a"] for row in read_json_lines(path)] == [1, 2]
    assert not repair_json_lines(path)


def test_damaged_json_error_names_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(DstrialError, match=r"rows\.jsonl:2 is 'nonsense'; expected a JSON object"):
        read_json_lines(path)
    (tmp_path / "document.json").write_text("{")
    with pytest.raises(DstrialError, match=r"document\.json is not JSON"):
        read_json(tmp_path / "document.json")
    assert read_json(tmp_path / "missing.json") is None


def test_append_on_full_disk_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_json_line(path, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match=r"rows\.jsonl"):
            append_json_line(path, {"a": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == '{"a": 1}\n'


def test_atomic_write_on_full_disk_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_json_atomically(path, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError):
            write_json_atomically(path, {"a": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_json(path) == {"a": 1}
    assert names_in(tmp_path) == ["document.json"]


def test_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonLinesTail(path)
    assert tail.poll() == []
    append_json_line(path, {"a": 1})
    assert tail.poll() == [{"a": 1}]
    for text, rows in (('{"a": ', []), ("2}\n", [{"a": 2}])):
        with path.open("a") as file:
            file.write(text)
        assert tail.poll() == rows
    append_json_line(tmp_path / "new", {"a": 5})
    (tmp_path / "new").replace(path)
    assert tail.poll() == [{"a": 5}]
