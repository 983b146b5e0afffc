"""The supervisor: output, exit records and clean-up of an allocation."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rows import allocation_request
from stubborn_trees import nobody_changes
from tmp_cleaner import clean
from waiting import wait_for

from dstrial.master.backends import local
from dstrial.master.backends.backend import AllocationExit, SupervisorHandle
from dstrial.master.backends.devices import Slot
from dstrial.master.backends.environment import choose_ports
from dstrial.master.backends.log_file import read_lines
from dstrial.master.backends.model_definition import pack
from dstrial.master.backends.supervisor import start_time
from dstrial.storage_guard import SAVING_DIRECTORY

pytestmark = pytest.mark.process

Started = tuple[Path, SupervisorHandle]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    directories: list[Path] = []

    def start(entrypoint: str | list[str], **changes: Any) -> Started:
        directory = tmp_path / f"allocation{len(directories)}"
        directories.append(directory)
        storage = {"checkpoint_storage": {"type": "shared_fs", "host_path": "/ck", "storage_path": "a"}}
        fields = {
            "config": storage,
            "hparams": {"lr": len(directories)},
            "ports": choose_ports([]),
            **changes,
        }
        slots = (Slot(0, "cpu", "cpu", "cpu-0"),)
        local.prepare(allocation_request(directory, slots=slots, entrypoint=entrypoint, **fields))
        return directory, local.start(directory)

    yield start
    for directory in directories:
        local.kill(local.find(directory), directory)
        local.remove(directory)


def test_startup_hook_is_found_from_other_working_directory(
    run: Callable[..., Started], tmp_path: Path
) -> None:
    hook = base64.b64encode(b"export FROM_HOOK=yes\n").decode()
    files = pack([{"path": "startup-hook.sh", "type": 48, "content": hook, "mtime": "0", "mode": 0o600}])
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()

    started = run("echo $FROM_HOOK; pwd", model_definition=files, working_directory=str(elsewhere))

    assert ended(started).exit_code == 0
    lines = [text.strip() for _, text in printed(started[0])]
    assert lines[0].startswith("environment ")
    assert lines[1:] == ["yes", str(elsewhere)]


def ended(started: Started) -> AllocationExit:
    wait_for(lambda: local.poll_exit(*started), deadline_s=30)
    exit_ = local.poll_exit(*started)
    assert exit_ is not None
    return exit_


def printed(directory: Path) -> list[tuple[str | None, str]]:
    return [(line.stdtype, line.text) for line in read_lines(directory, 0, 10**8).lines]


def living(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"sleep\0{mark}".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_output_is_kept_in_order_with_exit_code(run: Callable[..., Started]) -> None:
    many = "print('x' * 50000); [print(i) for i in range(50000)]"
    started = run(
        f"echo out; echo err >&2; printf 'a\\rb\\000c\\n'; {sys.executable} -c \"{many}\"; printf 'no newline'; exit 7"
    )

    assert ended(started).exit_code == 7
    lines = printed(started[0])
    assert ("stderr", "err\n") in lines
    out = [text for kind, text in lines if kind == "stdout"]
    assert out[:3] == ["out\n", "a\n", "b\0c\n"]
    assert out[-50001:] == [*(f"{i}\n" for i in range(50000)), "no newline\n"]
    split = [text.rstrip("\n") for text in out[3:-50001]]
    assert "".join(split) == "x" * 50000
    assert max(map(len, split)) <= 8192


def test_output_flood_is_bounded_keeping_both_ends(
    run: Callable[..., Started],
) -> None:
    program = "for i in range(200_000): print(f'line {i:06}')"

    started = run([sys.executable, "-c", program], log_bytes=2**20)

    assert ended(started).exit_code == 0
    assert (started[0] / "output.log").stat().st_size < 2**21 + 2**19
    texts = [text.rstrip("\n") for _, text in printed(started[0])]
    lines = [text for text in texts if text.startswith("line ")]
    assert (lines[0], lines[-1]) == ("line 000000", "line 199999")
    assert lines == sorted(set(lines)), "the remaining lines are complete, unique and in order"
    (left_out,) = [text for text in texts if text.endswith("lines are left out here")]
    assert len(lines) + int(left_out.split()[0]) == 200_000
    assert texts.index("the log has reached its size limit: only its end is added") < texts.index(left_out)


def test_temporary_directory_in_use_survives_cleaner(
    run: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "t"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    directory, handle = run('touch "$TMPDIR/used" && echo ready && sleep 60')
    wait_for(lambda: any("ready" in line.text for line in read_lines(directory, 0, 1000).lines))

    clean(root)

    assert [path.name for path in root.glob("*/*")] == ["used"]
    local.kill(handle, directory)


@pytest.mark.parametrize("ends_by", ["itself", "kill", "kill of its supervisor"])
def test_processes_end_with_allocation(run: Callable[..., Started], ends_by: str) -> None:
    """Processes of a killed supervisor are found by a marker in their environment."""
    directory, handle = run(f"setsid sleep 7650 & sleep 7650 & {'exit 0' if ends_by == 'itself' else 'wait'}")
    if ends_by != "itself":
        wait_for(lambda: len(living("7650")) >= 2)
    if ends_by == "kill":
        local.kill(handle, directory)
    elif ends_by == "kill of its supervisor":
        os.kill(handle.pid, signal.SIGKILL)

    exit_ = ended((directory, handle))

    assert exit_.exit_code == (0 if ends_by == "itself" else 137)
    assert exit_.was_lost == (ends_by == "kill of its supervisor")
    assert living("7650") == []


def test_terminate_waits_for_graceful_exit_behind_shell(run: Callable[..., Started], tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    (tmp_path / "program.py").write_text(program)
    directory, handle = run(f"true; python3 {tmp_path / 'program.py'}; true")
    wait_for(lambda: any(text == "ready\n" for _, text in printed(directory)))

    local.terminate(handle)
    ended((directory, handle))

    assert ("stdout", "saved\n") in printed(directory)


def test_find_checks_record_and_kill_needs_none(run: Callable[..., Started]) -> None:
    directory, handle = run("sleep 7653")
    record = directory / "supervisor.json"
    wait_for(record.exists)
    assert local.find(directory) == handle

    for damaged in (json.dumps({"pid": handle.pid, "start_time": "another"}), "{}", "no JSON"):
        record.write_text(damaged)
        assert local.find(directory) is None
    record.unlink()
    assert local.find(directory) is None

    local.kill(None, directory)

    wait_for(lambda: not local.is_alive(handle))
    assert living("7653") == []


@pytest.mark.parametrize(("entrypoint", "code"), [(["no-such-program"], 127), (["/etc/passwd"], 126)])
def test_unstartable_entrypoint_ends_with_shell_exit_code(
    run: Callable[..., Started], entrypoint: list[str], code: int
) -> None:
    assert ended(run(entrypoint)).exit_code == code


def test_entrypoint_gets_own_cluster_info_hook_and_sitecustomize(
    run: Callable[..., Started], tmp_path: Path
) -> None:
    """Two allocations at once; the user's own ``sitecustomize`` runs as well."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("print('mine')\n")
    program = (
        "import determined as det, os; i = det.get_cluster_info();"
        "print(i.trial.hparams, i.trial._config['checkpoint_storage'], len(os.environ['TMPDIR']) < 40, os.environ['FROM_HOOK'])"
    )
    changes = {
        "startup_hook": "export FROM_HOOK=7; echo hook",
        "config": {
            "environment": {"environment_variables": [f"PYTHONPATH={tmp_path / 'mine'}"]},
            "checkpoint_storage": {"type": "shared_fs", "host_path": "/ck", "storage_path": "a"},
        },
    }
    both = [run(["python3", "-c", program], **changes) for _ in range(2)]

    assert [ended(one).exit_code for one in both] == [0, 0]
    storage = "{'type': 'directory', 'container_path': '/ck/a'}"
    for number, (directory, _) in enumerate(both, 1):
        shown = f"{{'lr': {number}}} {storage} True 7\n"
        assert [text for _, text in printed(directory)] == ["hook\n", "mine\n", shown]


def test_deepspeed_command_gets_own_master_port(run: Callable[..., Started], tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "deepspeed").write_text('#!/bin/sh\necho "$@"\n')
    (fake / "deepspeed").chmod(0o755)
    started = run(
        f"PATH=$(echo $PATH | cut -d: -f1):{fake}:/usr/bin:/bin; deepspeed train.py; deepspeed --master_port 5 x"
    )

    ended(started)

    first, second = (text for _, text in printed(started[0]))
    assert 29500 <= int(first.removeprefix("--master_port ").split()[0]) < 31500
    assert first.endswith("train.py\n")
    assert second == "--master_port 5 x\n"


@pytest.mark.parametrize("content", ["no JSON", "{}"])
def test_invalid_exit_record_means_failed_allocation(
    run: Callable[..., Started], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    directory, handle = run("echo begun; setsid sleep 3542")
    wait_for(lambda: living("3542"))
    os.kill(handle.pid, signal.SIGKILL)
    wait_for(lambda: not local.is_alive(handle))
    (directory / "exit.json").write_text(content)

    exit_ = local.poll_exit(directory, handle)

    assert exit_ is not None
    assert (exit_.was_lost, exit_.exit_code) == (False, 1)
    assert living("3542") == []
    (line,) = [record.message for record in caplog.records]
    assert str(directory / "exit.json") in line


def test_begun_checkpoints_returns_only_uuids(tmp_path: Path) -> None:
    uuid = "0b4ae0d4-0b0b-4b0b-8b0b-0123456789ab"
    saving = tmp_path / SAVING_DIRECTORY
    saving.mkdir()
    for name in (uuid, "datasets", ".hidden"):
        (saving / name).touch()
    assert local.begun_checkpoints(tmp_path) == [uuid]


def test_harness_files_stay_in_allocation_directory(run: Callable[..., Started], tmp_path: Path) -> None:
    program = """
import os, stat, sys
from determined import ipc, tensorboard

directory, temporary = os.environ["DSTRIAL_ALLOCATION_DIR"], os.environ["TMPDIR"]
print(str(tensorboard.get_base_path({})).startswith(directory + "/tensorboard/"))
print(ipc.read_pid_server_addr("/tmp/pid_server-1.x.1") == temporary + "/pid_server", ipc.read_pid_server_addr("a:1"))
os.umask(0o027)
manager = tensorboard.build("c", "1", "1", {"type": "directory", "container_path": sys.argv[1] + "/new"})
print([oct(stat.S_IMODE(os.stat(sys.argv[1] + part).st_mode)) for part in ("/new", "/new/c/tensorboard")])
"""
    started = run(["python3", "-c", program, str(tmp_path)])

    assert ended(started).exit_code == 0
    assert [text for _, text in printed(started[0])] == [
        "True\n",
        "True ('a', 1)\n",
        "['0o750', '0o750']\n",
    ]


def test_remove_deletes_readonly_files(run: Callable[..., Started]) -> None:
    started = run(
        "mkdir -p $TMPDIR/a/b locked && touch $TMPDIR/a/b/c && chmod 500 $TMPDIR/a/b $TMPDIR/a locked; echo $TMPDIR"
    )
    ended(started)
    temporary = Path(printed(started[0])[-1][1].strip())

    local.remove(started[0])

    assert not temporary.exists()
    assert not started[0].exists()


def test_remove_failure_is_logged_without_raising(
    run: Callable[..., Started], caplog: pytest.LogCaptureFixture
) -> None:
    started = run("true")
    ended(started)

    with nobody_changes(started[0] / "workdir"):
        (started[0] / "deletable").touch()
        local.remove(started[0])

    assert [path.name for path in started[0].iterdir()] == ["workdir"]
    assert str(started[0]) in caplog.text


SEMAPHORES = """
import ctypes, multiprocessing, multiprocessing.shared_memory, platform, sys, threading, time

semaphore = multiprocessing.get_context("spawn").Semaphore()
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
print(semaphore._semlock.name, memory.name, flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
if sys.argv[1] == "without":
    # exit(2) ends the first thread alone; the kernel calls such a process a zombie while its other threads work.
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
time.sleep(600)
"""


@pytest.mark.parametrize("first_thread", ["with", "without"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_kill_removes_shared_memory_and_semaphores(
    run: Callable[..., Started], is_lost: bool, first_thread: str
) -> None:
    started = run(["sh", "-c", f'{sys.executable} -c "$0" {first_thread} & wait', SEMAPHORES])
    directory, handle = started
    wait_for(lambda: printed(directory), "the names")
    semaphore, memory = printed(directory)[-1][1].split()
    places = [Path(f"/dev/shm/sem.{semaphore.lstrip('/')}"), Path("/dev/shm") / memory.lstrip("/")]
    assert all(place.exists() for place in places)

    if is_lost:
        os.kill(handle.pid, signal.SIGKILL)
        wait_for(lambda: not local.is_alive(handle), "the supervisor's end")
        local.kill(None, directory)
    else:
        local.kill(handle, directory)
        ended(started)

    wait_for(lambda: not any(place.exists() for place in places), f"{places} to go", deadline_s=5)


def test_kill_spares_session_of_another_boot(tmp_path: Path) -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 300 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    member = int(leader.stdout.readline())
    leader.wait()
    record = {"pid": leader.pid, "start_time": "another-boot/1"}
    (tmp_path / "supervisor.json").write_text(json.dumps(record))
    try:
        local.kill(None, tmp_path)
        assert start_time(member) is not None
    finally:
        os.kill(member, signal.SIGKILL)
