"""``python -m dstrial.launch`` with real rank processes and signals."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_start
from waiting import wait_for

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).with_name("launch_programs.py")
DEADLINE_S = 120.0


def _environ(*, has_threads: bool = True) -> dict[str, str]:
    left_out = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**environ, "DS_ACCELERATOR": "cpu", **({"OMP_NUM_THREADS": "1"} if has_threads else {})}


@contextlib.contextmanager
def launched(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with warm_start.Popen(
        [sys.executable, "-m", "dstrial.launch", *words],
        cwd=cwd,
        env=_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def launch(*words: str, cwd: Path, has_threads: bool = True) -> subprocess.CompletedProcess[str]:
    return warm_start.run_command(
        [sys.executable, "-m", "dstrial.launch", *words],
        cwd=cwd,
        env=_environ(has_threads=has_threads),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("module", ["dstrial.launch", "dstrial"])
def test_command_beside_checkout_runs_or_explains_import_error(module: str, tmp_path: Path) -> None:
    """The result depends on how dstrial is installed."""
    (tmp_path / "dstrial").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    why = (
        f"ImportError: Python imports the directory {tmp_path / 'dstrial'} in place of the installed package"
    )
    assert ended.stdout.startswith("usage: ") or why in ended.stderr, ended.stderr


wait_until = functools.partial(wait_for, deadline_s=DEADLINE_S)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_launch_two_ranks_with_one_thread_each(tmp_path: Path) -> None:
    result = launch("--slots", "2", str(PROGRAMS), "exchange", cwd=tmp_path, has_threads=False)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 total 3 threads 1", "rank 1 total 3 threads 1"]


def test_first_failing_rank_is_printed_with_traceback_last(tmp_path: Path) -> None:
    result = launch("--slots", "2", str(PROGRAMS), "raise_on_rank_1", cwd=tmp_path)
    assert result.returncode == 1
    assert "Connection closed by peer" not in result.stderr, "a consequence is told beside its cause"
    last = result.stderr.rpartition("rank 1 failed first (exit code 1, host ")[2]
    assert result.stderr.count("Traceback") == 1
    assert last.splitlines()[1] == "Traceback (most recent call last):"
    assert last.rstrip().endswith("ValueError: the second rank is broken")
    assert "rank_main" not in last


def test_full_traceback_is_written_to_private_file(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import torch\n\ntorch.nn.Linear(3, 4)(torch.zeros(2, 2))\n")
    result = launch("--slots", "1", "wrong.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last):") == 1
    assert "/nn/modules/module.py" not in result.stderr
    (whole,) = (tmp_path / "runs" / "tracebacks").glob("*/rank_0.txt")
    assert f"whole traceback in {whole.relative_to(tmp_path)}:" in result.stderr
    assert "/nn/modules/module.py" in whole.read_text()
    assert whole.stat().st_mode & 0o077 == whole.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("program", "code", "how"),
    [
        ("kill_rank_1", 128 + signal.SIGKILL, "killed by SIGKILL"),
        ("exit_with_7_on_rank_1", 7, "exit code 7"),
        ("leave_on_rank_1", 1, "exit code 0"),
    ],
)
def test_rank_without_traceback_is_first_failure(program: str, code: int, how: str, tmp_path: Path) -> None:
    result = launch("--slots", "2", str(PROGRAMS), program, cwd=tmp_path)
    assert result.returncode == code
    assert f"rank 1 failed first ({how}, host " in result.stderr
    assert "rank 0 failed first" not in result.stderr


def test_rank_hanging_after_peer_failure_is_killed(tmp_path: Path) -> None:
    result = launch("--slots", "2", str(PROGRAMS), "raise_on_rank_0_while_rank_1_hangs", cwd=tmp_path)
    assert result.returncode == 1
    assert "rank 0 failed first" in result.stderr
    assert "dstrial.launch: rank(s) 1 did not end in time and were killed" in result.stderr


@pytest.mark.exhaustive("[SIGTERM]", "[SIGINT]")
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda s: s.name)
def test_stop_signal_is_forwarded_to_ranks_as_sigterm(asked: signal.Signals, tmp_path: Path) -> None:
    with launched("--slots", "2", str(PROGRAMS), "stop_when_asked", cwd=tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
        process.send_signal(asked)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    assert f"{asked.name} received: the ranks were asked to stop" in stderr
    for rank in range(2):
        requested, was_helper_alive, helper = (tmp_path / f"stopped.{rank}").read_text().split()
        assert (requested, was_helper_alive) == ("SIGTERM", "True")
        wait_until(lambda pid=int(helper): not is_running(pid))


def test_peer_loss_after_stop_request_is_not_failure(tmp_path: Path) -> None:
    with launched("--slots", "2", str(PROGRAMS), "stop_before_rank_0", cwd=tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "failed first" not in stderr


def test_sigterm_to_ranks_and_launcher_is_stop(tmp_path: Path) -> None:
    """systemd and Slurm send SIGTERM to all processes of a job."""
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, time\npathlib.Path('ready.' + os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with launched("--slots", "2", "sleeps.py", cwd=tmp_path) as process:
        wait_until(lambda: len([p for p in tmp_path.glob("ready.*") if p.read_text()]) == 2)
        process.send_signal(signal.SIGSTOP)  # so that the ranks end before the launcher can signal them
        for rank in range(2):
            pid = int((tmp_path / f"ready.{rank}").read_text())
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not is_running(pid))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "failed first" not in stderr


def test_second_sigint_kills_ranks(tmp_path: Path) -> None:
    with launched("--slots", "2", str(PROGRAMS), "never_stop", cwd=tmp_path) as process:
        wait_until(lambda: all(path.read_text() for path in tmp_path.glob("ready.*")))
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
        pids = [int((tmp_path / f"ready.{rank}").read_text()) for rank in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "SIGINT received" in process.stderr.readline()
        assert all(map(is_running, pids))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not any(map(is_running, pids))


def test_ranks_end_when_launcher_is_killed(tmp_path: Path) -> None:
    with launched("--slots", "2", str(PROGRAMS), "never_stop", cwd=tmp_path) as process:
        wait_until(lambda: len([p for p in tmp_path.glob("ready.*") if p.read_text()]) == 2)
        process.kill()
    for rank in range(2):
        pid = int((tmp_path / f"ready.{rank}").read_text())
        wait_until(lambda pid=pid: not is_running(pid))


def test_script_path_and_arguments_are_passed_literally(tmp_path: Path) -> None:
    directory = tmp_path / 'it\'s a "dir" $HOME'
    directory.mkdir()
    script = directory / "my script.py"
    script.write_text("import sys\nprint(sys.argv, __name__, sys.path[0])\n")
    words = ["two words", "it's", '"quoted"', "$HOME", "${local_rank}", "$$", ""]
    for command in ([str(script)], ["python", str(script)]):
        result = launch("--slots", "1", *command, *words, cwd=directory)
        assert result.stdout == f"{[str(script), *words]} __main__ {directory}\n", result.stderr


def test_launch_runs_module_and_plain_program(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("import os\nprint('module', os.environ['RANK'])\n")
    assert launch("--slots", "1", "-m", "my_module", cwd=tmp_path).stdout == "module 0\n"
    program = launch("--slots", "1", "sh", "-c", "echo program $RANK; exit 3", cwd=tmp_path)
    assert (program.stdout, program.returncode) == ("program 0\n", 3)


TRIAL_CONFIG = "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n"


def test_runs_directory_is_relative_to_launcher_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRIAL_RUNS_DIR", "elsewhere")
    context_dir = tmp_path / "ctx"
    context_dir.mkdir()
    (tmp_path / "exp.yaml").write_text(TRIAL_CONFIG)
    (context_dir / "model_def.py").write_text(
        "from pathlib import Path\nfrom dstrial.local.run_directory import default_runs_dir\n"
        "print(Path.cwd(), default_runs_dir())\n"
    )
    words = ["--slots", "1", "--config", "exp.yaml", "--context-dir", "ctx", "--trial", "model_def:MyTrial"]
    result = launch(*words, cwd=tmp_path)
    assert result.stdout == f"{context_dir} {tmp_path / 'elsewhere'}\n", result.stderr


def test_trial_import_error_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(TRIAL_CONFIG)
    (tmp_path / "model_def.py").write_text("raise ValueError('bad model')\n")
    result = launch("--slots", "2", "--config", "exp.yaml", "--trial", "model_def:MyTrial", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("TrialImportError") == 1
    assert result.stderr.rstrip().endswith("ValueError: bad model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected either --trial model_def:MyTrial or a script to run"),
        (["--slots", "0", "train.py"], "--slots: the value is '0'; expected an integer of at least 1"),
        (["nope.py"], "the script is 'nope.py'; expected a Python file"),
        (["--trial", "model_def:MyTrial"], "--config is missing off a cluster"),
        (["no-such-program"], "the command is 'no-such-program'"),
        (
            ["--hostfile", "hosts", "train.py"],
            "--hostfile is not its option; use `dstrial run EXP.yaml --hostfile FILE`",
        ),
    ],
)
def test_invalid_command_line_exits_2_with_message(words: list[str], message: str, tmp_path: Path) -> None:
    result = launch(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
