"""A check that hangs, and so does a daemon of another session that it has started and forgotten."""

import pathlib
import subprocess
import sys
import time


def run(bench):
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(bench.directory / "daemon").write_text(str(daemon.pid))
    bench.note(doing="waiting for Godot", seen=1)
    time.sleep(600)
