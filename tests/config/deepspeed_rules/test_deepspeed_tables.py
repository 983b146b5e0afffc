"""Rule tables per DeepSpeed release; the newest serves releases without a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.config import deepspeed_schema
from dstrial.config.deepspeed_schema import deepspeed_rules, read_table, releases


@pytest.fixture
def another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add release 0.19.10, whose table lists differences from the newest release."""
    newest = releases()[-1]
    for release in releases():
        (tmp_path / f"{release}.json").write_text(json.dumps(read_table(release)))
    differences = {"deepspeed": "0.19.10", "differs_from": newest}
    table = {**differences, "set": {"deepspeed": "0.19.10"}, "absent": ["root.keys.optimizer"]}
    (tmp_path / "0.19.10.json").write_text(json.dumps(table))
    monkeypatch.setattr(deepspeed_schema, "_TABLES", tmp_path)
    releases.cache_clear()
    yield "0.19.10"
    releases.cache_clear()


def test_table_file_name_matches_its_release() -> None:
    assert {release: deepspeed_rules(release).version for release in releases()} == {
        release: release for release in releases()
    }
    assert {"0.19.0", "0.19.8"} <= set(releases())


def test_added_table_makes_release_known(another_release: str) -> None:
    assert releases()[-1] == another_release
    assert deepspeed_rules(f"{another_release}+cpu").version == another_release
    assert "optimizer" in read_table("0.19.8")["root"]["keys"]
    assert "optimizer" not in read_table(another_release)["root"]["keys"]


def test_unknown_release_uses_newest_table() -> None:
    assert deepspeed_rules("0.99.1").version == releases()[-1]
