"""A program sees the same process state in a fork as in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
from warm_start import SWITCH, ForkedPopen

from dstrial.fork_server.client import ForkServer
from dstrial.master.backends.fork_servers import IMPORTS

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

DEADLINE_S = 150.0
# A new process imports this module first; a fork has it already.
STATE = """
import dstrial.launch.imported_ahead
import atexit, faulthandler, gc, json, locale, logging, multiprocessing, os, random, resource, signal, sys, tempfile
import threading, warnings
import determined.constants, numpy, torch

def shown(handler):
    return handler if isinstance(handler, (int, type(None))) else getattr(handler, "__qualname__", str(handler))

ours = {"PYTEST_CURRENT_TEST"}
origins = {name: getattr(getattr(one, "__spec__", None), "origin", None) for name, one in sys.modules.items()}
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "modules": {name: origins[name] for name in sorted(origins)},
    "ports": [determined.constants.DTRAIN_SSH_PORT, determined.constants.INTER_TRAIN_PROCESS_COMM_PORT_1],
    "name": __name__,
    "file": globals().get("__file__"),
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path,
    "flags": list(sys.flags),
    "directory": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name not in ours},
    "umask": os.umask(0o22),
    "nice": os.nice(0),
    "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "handlers": {str(int(one)): str(shown(signal.getsignal(one))) for one in sorted(signal.valid_signals())},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{one}").partition(":")[0]
                          for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")),
    "num_threads": len(os.listdir("/proc/self/task")),
    "parent": os.getppid(),
    "process": multiprocessing.current_process().name,
    "found_from": multiprocessing.process.ORIGINAL_DIR,
    "spec": getattr(sys.modules["__main__"].__spec__, "name", None),
    "wakeup": signal.set_wakeup_fd(-1),
    "stdin": os.read(0, 10).decode(),
    "is_main_thread": threading.current_thread() is threading.main_thread(),
    "torch": [torch.get_num_threads(), torch.get_num_interop_threads(),
              str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "recursion": sys.getrecursionlimit(),
    "switch": sys.getswitchinterval(),
    "warnings": [str(one) for one in warnings.filters],
    "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
    "locale": locale.setlocale(locale.LC_ALL),
    "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
    "streams": [(one.line_buffering, one.write_through, one.errors) for one in (sys.stdin, sys.stdout, sys.stderr)],
    "start_method": multiprocessing.get_start_method(allow_none=True),
    "temporary": tempfile.gettempdir(),
    "faulthandler": faulthandler.is_enabled(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    "hook": sys.excepthook is sys.__excepthook__,
}))
atexit.register(print, "at exit")
threading.Thread(target=print, args=("in a thread",)).start()
"""
DRAWS = """
import dstrial.launch.imported_ahead
import multiprocessing, os, random, uuid, numpy, tempfile, torch
print(random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.initial_seed())
print(uuid.uuid4(), next(tempfile._get_candidate_names()), bytes(multiprocessing.current_process().authkey).hex())
"""
ENDS = {
    "with a negative code": "import sys; sys.exit(-9)",
    "a number": "import sys; sys.exit(3)",
    "a large number": "import sys; sys.exit(259)",
    "words": "import sys; sys.exit('no')",
    "an error": "def f():\n    raise ValueError('wrong')\nf()",
    "an interruption": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "a kill": "import os; os.kill(os.getpid(), 9)",
    "at once": "import os; print('lost', end=''); os._exit(4)",
    "output without a line's end": "import sys; sys.stdout.write('a'); sys.stderr.write('b')",
    "its streams": "import sys\n"
    "for one in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(one.name, one.mode, one.buffer.mode, one.seekable(), one.isatty(), one.line_buffering, one.write_through)\n"
    "sys.stdout.reconfigure(errors='backslashreplace')\n"
    "sys.stderr.reconfigure(encoding='utf-16')\n"
    "print('\\udc80')",
    "syntax": "print('x'",
    "annotations": "def f(a: int): pass\nprint(f.__annotations__, __file__)",
    "an error of a later line": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('then') from e",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = ForkServer(variables(), IMPORTS, log=log)
    warm_start.servers.add(server.pid)
    assert server.is_ready(DEADLINE_S), log.read_text()
    yield server
    server.close()
    warm_start.servers.discard(server.pid)


def variables(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", SWITCH: "0", **more}


def outcome(server: ForkServer | None, words: list[str], directory: Path, **options: Any) -> tuple[Any, ...]:
    """Run ``python WORDS``; return the exit code, stdout and stderr."""
    reasons: list[str] = []
    command = [sys.executable, *words]
    pipe = subprocess.PIPE
    given = {"env": variables(TMPDIR=str(directory)), "cwd": directory, "text": True, **options}
    with ForkedPopen(server, command, told=reasons.append, stdout=pipe, stderr=pipe, **given) as program:
        texts = program.communicate(timeout=DEADLINE_S)
    assert not reasons
    return program.returncode, *texts


@pytest.mark.exhaustive("[a file-True]", "[a module-False]")
@pytest.mark.parametrize("leads_session", [False, True])
@pytest.mark.parametrize("way", ["a file", "a module"])
def test_fork_initial_state_equals_new_process(
    server: ForkServer, tmp_path: Path, way: str, leads_session: bool
) -> None:
    (tmp_path / "state_of_this.py").write_text(STATE)
    words = ["-m", "state_of_this", "--a", "b c"] if way == "a module" else ["state_of_this.py", "--a", "b c"]
    ports = {"DTRAIN_SSH_PORT": "4321", "INTER_TRAIN_PROCESS_COMM_PORT_1": "4322"}
    options: dict[str, Any] = {"start_new_session": leads_session, "stdin": subprocess.DEVNULL}
    options["env"] = variables(TMPDIR=str(tmp_path), **ports)

    executed = outcome(None, words, tmp_path, **options)
    forked = outcome(server, words, tmp_path, **options)

    assert executed[0] == 0, executed
    assert forked[0] == 0, forked
    states = [json.loads(one[1].splitlines()[0]) for one in (executed, forked)]
    differing = {
        name: [state[name] for state in states] for name in states[0] if states[0][name] != states[1][name]
    }
    assert not differing, json.dumps(differing)
    assert forked[1].splitlines()[1:] == executed[1].splitlines()[1:]


def test_forks_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    drawn = [outcome(server, ["draws.py"], tmp_path)[1].split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True))


SAYS_WHERE = """
import sys
print(sys.stdin.seekable(), sys.stdout.seekable(), sys.stdout.tell(), sys.stdin.readline())
print(sys.stdout.tell(), sys.stdin.tell())
"""


def test_fork_streams_report_same_positions_as_new_process(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS_WHERE)
    (tmp_path / "in").write_text("one\ntwo\n")
    texts = []
    for one in (server, None):
        out = tmp_path / "out"
        out.write_text("before\n")
        with (tmp_path / "in").open() as taken, out.open("a") as given:
            command = [sys.executable, "says.py"]
            with ForkedPopen(
                one, command, env=variables(), cwd=tmp_path, stdin=taken, stdout=given
            ) as program:
                assert program.wait(DEADLINE_S) == 0
        texts.append(out.read_text())

    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ENDS)
def test_fork_exit_and_output_equal_new_process(server: ForkServer, tmp_path: Path, name: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS[name])
    assert outcome(server, ["ends.py"], tmp_path) == outcome(None, ["ends.py"], tmp_path)
