"""The batch script of a job that only holds nodes: when it ends by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dstrial.slurm.script import ALIVE_NAME, holding_script

pytestmark = pytest.mark.process

_FIND = """#!/bin/bash
# The n-th call does what the n-th line of the file `results` says, or the last line.
echo >> calls
number=$(wc -l < calls)
case "$(head -n "$number" results | tail -n 1)" in
    fails) echo "find: '.': Stale file handle" >&2; exit 1 ;;
    seen) echo alive ;;
esac
"""


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """Return a job directory; ``sleep`` of the script takes 10 ms."""
    commands = tmp_path / "bin"
    commands.mkdir()
    write_command(commands / "sleep", "#!/bin/bash\nexec /bin/sleep 0.01\n")
    directory = tmp_path / "a place"
    directory.mkdir()
    return directory


def write_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def start_script(job_dir: Path) -> subprocess.Popen[str]:
    text = holding_script(name="trial-7@1f2a3b4c", title="t", request=[], options=[], directory=job_dir)
    environ = {
        **os.environ,
        "PATH": f"{job_dir.parent / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "host1",
        "SLURM_TASKS_PER_NODE": "2",
    }
    return subprocess.Popen(["bash", "-c", text], env=environ, stdout=subprocess.PIPE, text=True)


def num_find_calls(job_dir: Path, results: list[str]) -> int:
    """Run the script with these results of ``find``; return the number of calls."""
    write_command(job_dir.parent / "bin" / "find", _FIND)
    (job_dir / "results").write_text("".join(f"{result}\n" for result in results))
    with start_script(job_dir) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == "the master was silent for 60 minutes: the job ends\n"
    return len((job_dir / "calls").read_text())


def test_failed_find_does_not_end_job(job_dir: Path) -> None:
    assert num_find_calls(job_dir, [*["fails"] * 20, "seen", "fails", "none"]) == 23


def test_job_ends_hour_after_last_heartbeat(job_dir: Path) -> None:
    alive = job_dir / ALIVE_NAME
    alive.touch()
    with start_script(job_dir) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        an_hour_ago = alive.stat().st_mtime - 3660
        os.utime(alive, (an_hour_ago, an_hour_ago))
        assert process.wait(60) == 0
    assert (job_dir / "12.nodes").read_text() == "host1 2\n"
