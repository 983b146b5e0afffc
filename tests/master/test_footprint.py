"""Libraries that the master process must not load."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_start

from dstrial.testing.master import master_for_test


@pytest.mark.process
def test_master_process_maps_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_start.SWITCH, "0")
    with master_for_test(tmp_path) as master:
        maps = Path(f"/proc/{master.record.pid}/maps").read_text()

    assert "libtorch" not in maps
    assert "libpython" in maps or "python" in maps
