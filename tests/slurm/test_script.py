"""Batch scripts, their sbatch options, and when a holding job ends by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dstrial.errors import ConfigError
from dstrial.slurm.script import (
    ALIVE_NAME,
    asks_for_devices,
    batch_script,
    holding_script,
    notice_s,
    request_lines,
    sbatch_args,
    value_of,
)


def test_sbatch_args_keep_order_and_values() -> None:
    settings = {"sbatch_args": ["-p", "gpu", "--time=1:00:00", "--exclusive"]}
    found = sbatch_args(settings, ["--partition=other"], "exp.yaml")
    assert found == ["-p gpu", "--time=1:00:00", "--exclusive", "--partition=other"]
    assert value_of(found, "--partition", "-p") == "other"
    assert value_of(found[:1], "--partition", "-p") == "gpu"
    assert value_of(["-pgpu"], "-p") == "gpu"
    assert value_of(found, "--exclusive") == ""
    assert value_of(found, "--nodes", "-N") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--partition=gpu", "a list of options of sbatch"),
        (["partition"], "slurm.sbatch_args[0]"),
        (["--comment=a\n#SBATCH --uid=0"], "slurm.sbatch_args[0]"),
        ([["--x"]], "a list of options of sbatch"),
    ],
)
def test_invalid_sbatch_args_are_rejected(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sbatch_args({"sbatch_args": given}, [], "exp.yaml")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "options", "slots", "devices", "lines"),
    [
        ({}, [], 4, False, ["--ntasks=4"]),
        ({}, [], 4, True, ["--ntasks=4", "--gpus-per-task=1"]),
        ({"gpu_type": "h100"}, [], 1, True, ["--ntasks=1", "--gpus-per-task=h100:1"]),
        ({"slots_per_node": 2}, [], 4, False, ["--ntasks=4", "--nodes=2", "--ntasks-per-node=2"]),
        ({"slots_per_node": 8}, [], 4, False, ["--ntasks=4", "--nodes=1", "--ntasks-per-node=4"]),
        ({}, ["--nodes=2", "--ntasks-per-node=2"], 4, False, []),
        ({}, ["--gres=gpu:2"], 4, True, ["--ntasks=4"]),
        ({}, ["-N 2"], 4, True, ["--gpus-per-task=1"]),
    ],
)
def test_request_lines_request_task_per_slot(
    settings: dict[str, Any], options: list[str], slots: int, devices: bool, lines: list[str]
) -> None:
    assert request_lines(settings, options, slots, wants_devices=devices, where="exp.yaml") == lines
    assert asks_for_devices(options) == any("gpu" in option for option in options)


@pytest.mark.parametrize("per_node", [3, 0, "2", -1])
def test_indivisible_slots_per_node_is_rejected(per_node: Any) -> None:
    with pytest.raises(ConfigError, match="a multiple"):
        request_lines({"slots_per_node": per_node}, [], 4, wants_devices=False, where="exp.yaml")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, 120),
        ("2", 30),
        ("10", 60),
        ("60", 120),
        ("5:00", 30),
        ("0:10:00", 60),
        ("1-0", 120),
        ("UNLIMITED", 120),
    ],
)
def test_notice_is_tenth_of_time_limit(limit: str | None, seconds: int) -> None:
    assert notice_s(limit) == seconds


def test_batch_script_quotes_paths_and_names_origin() -> None:
    script = batch_script(
        name="digits",
        request=["--ntasks=2"],
        options=["--partition=gpu"],
        run_directory=Path("/my runs/100%/one"),
        working_directory=Path("/a dir"),
        command=["/v/bin/python", "-m", "dstrial", "run", "a b.yaml"],
        submitted_by="dstrial run 'a b.yaml'\nrm -rf /",
    )
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[1] == "# Written by: dstrial run 'a b.yaml' rm -rf /"
    assert '#SBATCH --output="/my runs/100%%/one/slurm.log"' in lines
    assert '#SBATCH --chdir="/a dir"' in lines
    ours, theirs = lines.index("#SBATCH --ntasks=2"), lines.index("#SBATCH --partition=gpu")
    assert ours < theirs, "the user's options come last and win"
    assert lines[-2:] == ["mkdir -p '/my runs/100%/one'", "exec /v/bin/python -m dstrial run 'a b.yaml'"]


@pytest.mark.parametrize("name", ["a\nb", "a\n#SBATCH --uid=0", "a\tb", "a\\b", "caf\udce9"])
def test_directory_with_unsupported_characters_is_refused(name: str) -> None:
    path = Path("/", name)
    with pytest.raises(
        ConfigError, match="expected a path of printable characters without a backslash, for Slurm"
    ):
        batch_script(
            name="x",
            request=[],
            options=[],
            run_directory=path,
            working_directory=Path("/"),
            command=["x"],
            submitted_by="x",
        )
    with pytest.raises(ConfigError, match="the run, working or state directory is"):
        holding_script(name="x", title="x", request=[], options=[], directory=path)


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


@pytest.mark.process
def test_failed_find_does_not_end_job(job_dir: Path) -> None:
    assert num_find_calls(job_dir, [*["fails"] * 20, "seen", "fails", "none"]) == 23


@pytest.mark.process
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
