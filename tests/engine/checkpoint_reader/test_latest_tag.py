"""The file ``latest`` of a checkpoint may only name a folder beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.engine.state import latest_tag
from dstrial.errors import CheckpointDamagedError


def test_latest_tag_is_folder_name(tmp_path: Path) -> None:
    assert latest_tag(tmp_path) is None
    (tmp_path / "latest").write_text("global_step3\n")
    assert latest_tag(tmp_path) == "global_step3"


@pytest.mark.parametrize("tag", ["../../x", "/etc", "a/b", "..", ".", "", "a\0b"])
def test_latest_tag_not_folder_name_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointDamagedError, match="expected the name of a folder"):
        latest_tag(tmp_path)
