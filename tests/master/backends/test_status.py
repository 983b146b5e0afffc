"""Status files that a master writes about its hosts, jobs and fork servers."""

from __future__ import annotations

from pathlib import Path

from dstrial.master.backends.status import HOSTS_NAME, ShownHost, StatusFile, shown_hosts


def test_status_file_without_records_is_deleted(tmp_path: Path) -> None:
    (tmp_path / HOSTS_NAME).write_text("of an earlier master")
    status = StatusFile(tmp_path / HOSTS_NAME)
    host = ShownHost("host1", 2, None, 7)
    status.write([host])
    assert shown_hosts(tmp_path) == [host]
    status.write([])
    assert list(tmp_path.iterdir()) == []
