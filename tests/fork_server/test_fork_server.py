"""A fork behaves like a new process; otherwise a new process is started."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for
from warm_start import SWITCH, ForkedPopen

from dstrial.fork_server.client import ForkRefusedError, ForkServer
from dstrial.fork_server.fork import MAX_FILES, Program
from dstrial.process_state import read_state

pytestmark = pytest.mark.process

_DEADLINE_S = 120.0


_VARIABLES = {
    **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONUNBUFFERED": "1",
    SWITCH: "0",  # the servers themselves are no forks
}


@contextlib.contextmanager
def _serving(*modules: str, place: Path, is_ready: bool = True, **files: str) -> Iterator[ForkServer]:
    """Yield a server that has imported ``modules``; ``files`` are module texts."""
    for name, text in files.items():
        (place / f"{name}.py").write_text(text, encoding="utf-8")
    variables = {**_VARIABLES, "PYTHONPATH": str(place)} if files else _VARIABLES
    server = ForkServer(variables, modules, log=place / "log")
    try:
        if is_ready:
            wait_for(server.is_ready, deadline_s=_DEADLINE_S)
        yield server
    finally:
        server.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """Yield a server that has imported only ``json``; tests may kill it."""
    with _serving("json", place=tmp_path) as server:
        yield server


def _fail(reason: str) -> None:
    pytest.fail(f"it is a new process: {reason}")


def _run(
    server: ForkServer | None,
    words: list[str],
    *,
    told: Callable[[str], None] = _fail,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program as a fork; if it is a new process, ``told`` gets the reason."""
    with ForkedPopen(
        server,
        [sys.executable, *words],
        told=told,
        env=options.pop("env", None) or (_VARIABLES if server is None else {**_VARIABLES, **server.key}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        texts = process.communicate(timeout=_DEADLINE_S)
    return subprocess.CompletedProcess(words, process.returncode, *texts)


def _refusal(server: ForkServer, words: list[str], **options: Any) -> tuple[str, str]:
    """Run a program; return its output and why it is no fork, or "" for a fork."""
    reasons: list[str] = []
    done = _run(server, words, told=reasons.append, **options)
    assert done.returncode == 0, done.stderr
    assert len(reasons) <= 1
    return done.stdout, "".join(reasons)


def _script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_fork_flushes_files_and_runs_exit_handlers(server: ForkServer, tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import atexit, threading, time\n"
        "kept = open('kept', 'w'); kept.write('text')\n"
        "raw = open('raw', 'wb'); raw.write(b'bytes')\n"
        "atexit.register(lambda: open('at_exit', 'w').write('ran'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), open('thread', 'w').write('ended'))).start()\n",
    )

    assert _run(server, [script], cwd=tmp_path).returncode == 0

    read = {name: (tmp_path / name).read_text() for name in ("kept", "raw", "at_exit", "thread")}
    assert read == {"kept": "text", "raw": "bytes", "at_exit": "ran", "thread": "ended"}


WRITER = """
import os, sys
print(sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")))
for number in map(int, sys.argv[1:]):
    os.write(number, b"%d" % number)
"""


def test_fork_keeps_passed_file_descriptors(server: ForkServer, tmp_path: Path) -> None:
    script = _script(tmp_path, WRITER)
    pipes = [os.pipe() for _ in range(MAX_FILES - 3)]
    # The descriptors arrive with other numbers, so moving one to its number may hit another one.
    numbers = [write for _, write in pipes]
    ended = _run(server, [script, *map(str, numbers)], pass_fds=numbers)
    assert (ended.returncode, ended.stdout) == (0, f"{numbers}\n")
    for read, write in pipes:
        os.close(write)
        with open(read, encoding="ascii") as file:  # a number
            assert file.read() == str(write)


def test_different_environment_starts_new_process_with_reason(server: ForkServer, tmp_path: Path) -> None:
    script = _script(tmp_path, "import os; print(os.environ['NEW_ONE'], os.getsid(0) == os.getpid())")
    variables = {**_VARIABLES, "NEW_ONE": "there"}
    assert _refusal(server, [script], env=variables, start_new_session=True) == (
        "there True\n",
        "NEW_ONE: not as where it was imported ahead",
    )


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_stopped_server_falls_back_with_reason(
    server: ForkServer, tmp_path: Path, harm: signal.Signals
) -> None:
    os.kill(server.pid, harm)
    wait_for(lambda: read_state(server.pid).letter in "TZ", deadline_s=_DEADLINE_S)
    server._connection.settimeout(1.0)
    output, reason = _refusal(server, [_script(tmp_path, "print('done')")])
    assert output == "done\n"
    assert reason in (
        "it has ended",
        "it does not answer (timed out)",
        "it does not answer ([Errno 32] Broken pipe)",
    )


def test_server_with_thread_or_cuda_refuses_forks(tmp_path: Path) -> None:
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    shutil.copy(next(word for word in loaded if word.endswith("/libm.so.6")), tmp_path / "libcuda.so.1")
    thread = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    driver = f"import ctypes\nLIBRARY = ctypes.CDLL({str(tmp_path / 'libcuda.so.1')!r})\n"
    for text, reason in ((thread, "it has 2 threads"), (driver, "it has used an accelerator")):
        with (
            _serving("module", place=tmp_path, is_ready=False, module=text) as server,
            pytest.raises(ForkRefusedError, match=reason),
        ):
            wait_for(server.is_ready, deadline_s=_DEADLINE_S)


@pytest.fixture(scope="module")
def server_of_found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Yield a server that has imported ``found``."""
    installed = tmp_path_factory.mktemp("installed")
    with _serving("found", place=installed, found="") as server:
        yield server


@pytest.mark.parametrize(
    ("file", "words", "named_like"),
    [
        ("found.py", ["-m", "program"], "found"),
        ("found/__init__.py", ["program.py"], "found"),
        ("there/found.py", ["program.py", "--context-dir", "there"], "found"),
        ("there/found.py", ["program.py", "--cont=there"], "found"),
        ("there/found.py", ["program.py", "there"], ""),
        ("found/other.py", ["program.py"], ""),
        ("other.py", ["program.py"], ""),
    ],
)
def test_program_beside_shadowing_module_is_no_fork(
    server_of_found: ForkServer, tmp_path: Path, file: str, words: list[str], named_like: str
) -> None:
    (tmp_path / "program.py").write_text("", encoding="utf-8")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("", encoding="utf-8")
    named = f"{tmp_path / file} is named like {named_like}, which is imported ahead"
    assert _refusal(server_of_found, words, cwd=tmp_path)[1] == (named if named_like else "")


def test_fork_runs_package_imported_ahead(tmp_path: Path) -> None:
    package = tmp_path / "taken"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "part": "value = 5\n",
        "__main__": "import taken.part\nprint(taken.part.value, __name__)\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    with _serving("taken.part", "taken.__main__", place=tmp_path, unused="") as server:
        assert _run(server, ["-m", "taken"]).stdout == "5 __main__\n"
        assert (
            _run(server, ["-m", "taken.part"]).stderr == ""
        )  # runpy must not warn that the module is already imported


def test_changed_module_prevents_fork(tmp_path: Path) -> None:
    with _serving("changing", place=tmp_path, changing="value = 1\n") as server:
        assert _run(server, [_script(tmp_path, "")]).returncode == 0
        module = tmp_path / "changing.py"
        module.write_text(
            "value = 1234\n"
        )  # detected at once: each fork compares the modules with their files
        assert _refusal(server, [_script(tmp_path, "")])[1] == f"{module} has changed since it was imported"


def test_server_ends_with_its_parent(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys, pathlib, time\n"
        "from dstrial.fork_server.client import ForkServer\n"
        "server = ForkServer(os.environ, ['json'], log=pathlib.Path('log'))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(1000)\n",
    )
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), deadline_s=_DEADLINE_S)


def test_hundred_forks_leak_no_resources(server: ForkServer, tmp_path: Path) -> None:
    def state() -> tuple[int, int, int]:
        status = Path(f"/proc/{server.pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir())), resident, len(children)

    script = _script(
        tmp_path,
        "import os, threading\nprint(len(os.listdir('/proc/self/fd')), threading.active_count(), len(os.environ))\n",
    )
    gc.collect()  # closes files that earlier tests left open
    own_files = len(list(Path("/proc/self/fd").iterdir()))
    said = [_run(server, [script]).stdout for _ in range(5)]
    first = state()
    said += [_run(server, [script]).stdout for _ in range(95)]
    last = state()

    assert set(said) == {said[0]}
    assert (last[0], last[2]) == (first[0], first[2])
    assert last[1] < first[1] + 2048  # KiB
    assert len(list(Path("/proc/self/fd").iterdir())) <= own_files


PARENT = """
import os, sys, threading
from dstrial.fork_server import client, fork

threading.Thread(target=sys.stdin.read, daemon=True).start()  # the spare was forked before
os.environ["OWN"] = "1"
words = [os.path.abspath("child.py")]
environment = {name: value for name, value in os.environ.items() if name != "OWN"} | {"RANK": "3"}
program = client.Program(words, environment, os.getcwd(), leads="group", umask=0o27, ends_with_parent=True)
for _ in range(2):
    child = client.fork_or_none(program, [0, 1, 2])
    print(child and (child.wait(), os.getpid()), flush=True)
"""
CHILD = """
import os, sys, threading
flags = [threading.active_count(), os.umask(0), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
print(os.getppid(), os.environ.get("RANK"), os.environ.get("OWN"), flags, flush=True)
sys.exit(5)
"""


def test_spare_process_is_fresh_child_of_fork(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    files = [os.open(os.devnull, os.O_RDONLY), os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 2]
    program = Program([_script(tmp_path, PARENT)], _VARIABLES, str(tmp_path), has_spare=True)
    process = server.start(program, files)
    for file in files[:2]:
        os.close(file)

    assert process.wait(_DEADLINE_S) == 0

    said = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert said == [f"{process.pid} 3 None [1, {0o27}, True, False]", f"(5, {process.pid})"] * 2


def test_spares_end_with_their_fork(server: ForkServer, tmp_path: Path) -> None:
    script = _script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    process = server.start(Program([script], _VARIABLES, str(tmp_path), has_spare=True), [null, write, 2])
    os.close(write)
    os.close(null)
    with open(read, encoding="ascii", closefd=False) as printed:
        assert printed.readline() == f"{process.pid}\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    assert len(children) == 1

    process.kill()

    assert process.wait(_DEADLINE_S) == -signal.SIGKILL
    assert os.read(read, 100) == b"", "a spare keeps what its parent prints to open"
    os.close(read)
    wait_for(lambda: not any(map(_runs, map(int, children))), deadline_s=_DEADLINE_S)


def _runs(pid: int) -> bool:
    state = read_state(pid)
    return state is not None and not state.has_ended
