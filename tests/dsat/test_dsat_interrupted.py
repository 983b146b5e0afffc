"""Searches that end before the first measurement: interrupted, or on a full disk."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from searching import command, environment

DEADLINE_S = 120

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def _dry_runs_in(directory: Path) -> list[str]:
    """Return the PIDs of dry runs whose command line contains the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in words and "dryrun" in words:
            found.append(path.parent.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_search_interrupted_in_dry_run_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = command("predict", tmp_path / "out", "--local")
    with log.open("wb") as file:
        search = subprocess.Popen(
            words, env=environment({"TMPDIR": str(tmp_path)}), stdout=file, stderr=subprocess.STDOUT
        )
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not _dry_runs_in(tmp_path):
        assert time.monotonic() < give_up_at_s
        assert search.poll() is None, log.read_text()
        time.sleep(0.05)
    search.send_signal(number)

    status = search.wait(DEADLINE_S)
    while _dry_runs_in(tmp_path):
        assert time.monotonic() < give_up_at_s, "a dry run goes on without its search"
        time.sleep(0.05)
    if number == signal.SIGINT:
        assert status == 128 + signal.SIGINT
        assert "nothing is measured yet, and the same command begins again" in log.read_text()


def test_search_on_full_disk_fails_without_search_file(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))

    ended = subprocess.run(
        command("asha", tmp_path / "out", "--local"),
        env=environment({"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        preexec_fn=limit,
    )

    assert ended.returncode == 1
    assert "cannot be written (File too large); expected room on the disk." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out" / "search.json").exists()
