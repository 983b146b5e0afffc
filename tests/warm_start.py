"""Start programs as forks of a process that has imported torch, DeepSpeed and dstrial.

A new process imports them for 2 to 4 s of CPU time, a fork for none. ``run`` and ``Popen`` stand for those of ``subprocess``. Run
as a program this file is that process: a fork server whose forks start their own masters, launchers and fork servers as forks.

``TEST_FORKS=0`` has every program start as a new process. Not for tests of how processes are started.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dstrial
from dstrial.determined_imports import SITE
from dstrial.fork_server import PATH_VARIABLE, client, differing, fork, import_places, server
from dstrial.fork_server.client import ForkRefusedError, ForkServer
from dstrial.fork_server.fork import Program

_IMPORTING_PYARROW = ("sklearn.datasets", "transformers.trainer")
if (
    importlib.util.find_spec("pyarrow") is not None
):  # ``datasets`` brings it; it starts a thread, so no fork is possible
    _IMPORTING_PYARROW = ()
IMPORTED_AHEAD = (
    "dstrial.launch.imported_ahead",
    "zmq",  # of several ranks under Determined's names
    *_IMPORTING_PYARROW,
    "torch.utils.tensorboard",  # chief's
    "torch.fx.experimental.symbolic_shapes",  # where backward is given gradients: pipelines, recomputed layers
    # of commands that tests give their masters
    "dstrial.cli.app",
    "dstrial.cli.up",
    "dstrial.cli.master",
    "dstrial.cli.status",
    "dstrial.master.server",
    # what it imports when it serves
    "dstrial.master.app",
    "dstrial.master.backends.hosts.backend",
    "dstrial.master.http.connection",
    "dstrial.master.scheduler.scheduler",
    "dstrial.master.webhooks.delivery",
    *(
        f"dstrial.master.api.{path.stem}"
        for path in Path(dstrial.__file__).parent.glob("master/api/[a-z]*.py")
    ),
    # All of it but ``cli.cli``, which takes the command line of whoever imports it.
    *(
        f"determined.cli.{name}"
        for name in (
            *("agent", "checkpoint", "command", "config_policies", "dev", "experiment", "job", "master"),
            *("model", "notebook", "oauth", "project", "rbac", "resource_pool", "resources", "shell"),
            *("sso", "task", "template", "tensorboard", "token", "trial", "user", "user_groups", "version"),
            "workspace",
        )
    ),
    "argcomplete.completers",
    "OpenSSL.SSL",
    "accelerate.data_loader",
)
"""What programs of tests import, sooner or later."""
SWITCH = "TEST_FORKS"
"""A variable: 0 has every program be a new process, as users have them."""
# Python and the libraries read these when they start: a program with others is a new process.
_READ_AT_START = ("PYTHON", "LD_", "DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCHDYNAMO_", "TORCH_LOGS", "TQDM_")
_SET_ANEW = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")  # by a fork
_VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
_ROOT = str(Path(dstrial.__file__).parents[1])
_LAUNCHERS = {"dstrial.launch", "determined.launch.deepspeed"}
# What starts processes of Python, which are then forks, too.
_STARTERS = {"dstrial", "dstrial.cli", "dstrial.dsat", "determined.pytorch.dsat", "dstrial.master.server"}
_STARTERS |= {"dstrial.dsat.search_trial", *_LAUNCHERS}
_POPEN_OPTIONS = list(inspect.signature(subprocess.Popen).parameters)[1:]
servers: set[int] = set()
"""Fork servers of this process, which end with it."""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the variables in which programs of tests must not differ."""
    environments = []
    for each in (one, other):
        places = [place for place in import_places(each) if place not in (SITE, _ROOT)]
        environments.append({**each, PATH_VARIABLE: os.pathsep.join(places)})
    names = differing(*environments)
    return [name for name in names if name.startswith(_READ_AT_START) and name not in _SET_ANEW]


class ForkedPopen(subprocess.Popen[Any]):
    """A ``subprocess.Popen`` whose ``[sys.executable, ...]`` is a fork: of ``server``, or of this process's spare.

    ``told`` is called with the reason where it is a new process all the same, ``known`` with its pid before it begins.
    """

    def __init__(
        self,
        server: ForkServer | None,
        args: Sequence[str],
        *,
        told: Callable[[str], object] = lambda _: None,
        known: Callable[[int], object] = lambda _: None,
        **options: Any,
    ) -> None:
        self._server, self._told, self._known = server, told, known
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(execute).bind(*given).arguments
        words = (
            [os.fspath(word) for word in asked["args"]] if isinstance(asked["args"], (list, tuple)) else [""]
        )
        # With options the interpreter itself is another one.
        is_python = words[0] == sys.executable and (words[1] == "-m" or not words[1].startswith("-"))
        if not is_python or asked["preexec_fn"] or not (self._server or fork.spare):
            execute(*given)
            return
        kept = sorted(asked["pass_fds"])
        program = Program(
            words[1:],
            dict(os.environ if asked["env"] is None else asked["env"]),
            str(Path.cwd() / os.fsdecode(asked["cwd"] or "")),
            (0, 1, 2, *kept),
            leads="session" if asked["start_new_session"] else "",
            has_spare=not _STARTERS.isdisjoint(words),
        )
        pipes = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [*(number if file == -1 else file for number, file in enumerate(pipes)), *kept]
        try:
            if self._server is not None:
                self.pid = self._server.start(program, files, known=self._known).pid
            else:
                self.pid = client.start_from_spare(program, files).pid
        except ForkRefusedError as reason:
            self._told(str(reason))
            execute(*given)
            return
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


class SparePopen(ForkedPopen):
    """``subprocess.Popen`` of forks: what starts a process of Python uses their spare."""

    def __init__(self, args: Any, *given: Any, **options: Any) -> None:
        options |= dict(zip(_POPEN_OPTIONS, given, strict=False))
        super().__init__(None, args, **options)


class Popen(ForkedPopen):
    """``subprocess.Popen`` whose ``[sys.executable, "-m", ...]`` or ``[sys.executable, FILE, ...]`` is a fork."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        variables = {**(os.environ if options.get("env") is None else options["env"])}
        may_fork = os.environ.get(SWITCH) != "0" and variables.get(SWITCH) != "0"
        may_fork = may_fork and os.fspath(args[0]) == sys.executable and __file__ not in args
        super().__init__(fork_server() if may_fork else None, list(map(os.fspath, args)), **options)
        if server.__name__ in self.args:
            servers.add(self.pid)


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str],
    timeout: float,
    is_merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ARGUMENTS`` to its end, with its output captured; ``is_merged`` has all of it in ``stdout``.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    stderr = subprocess.STDOUT if is_merged else subprocess.PIPE
    return run_command(
        [sys.executable, "-m", *arguments],
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        cwd=cwd,
        text=True,
    )


def run_command(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    input: str | None = None,  # noqa: A002  # as subprocess.run has it
    capture_output: bool = False,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Stand for ``subprocess.run``.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
        subprocess.CalledProcessError: with ``check``, it has failed.
    """
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as program:
        try:
            texts = program.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    ended = subprocess.CompletedProcess(command, program.returncode, *texts)
    if check:
        ended.check_returncode()
    return ended


def fork_server() -> ForkServer:
    """Return the process that is forked, once it has imported everything."""
    started = share()
    while not started.is_ready(60.0):
        pass
    return started


@functools.cache
def share() -> ForkServer:
    """Start the process that is forked."""
    started = ForkServer(
        {**os.environ, **_VARIABLES}, IMPORTED_AHEAD, log=Path(os.devnull), program=[__file__]
    )
    atexit.register(started.close)
    servers.add(started.pid)
    return started


def _become_server() -> None:
    """Serve; what is changed here is so in every fork."""
    from dstrial.master.backends import fork_servers

    vars(fork)["differing"] = vars(client)["differing"] = _differing
    vars(subprocess)["Popen"] = SparePopen
    # Of masters of tests scripts are forks, too, and the first trial: they would import the same for most of their time.
    vars(fork_servers)["trains_trial_class"] = lambda words: bool(_LAUNCHERS.intersection(words[:2]))
    is_ready, take_on = ForkServer.is_ready, vars(fork)["_adopt_state"]
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])

    def take_on_for_tests(program: Program, *given: Any) -> None:
        take_on(program, *given)
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        # What /proc/PID/cmdline shows, by which tests find processes: memory of the program that was executed (proc(5)).
        shown = b"\0".join(word.encode() for word in [sys.executable, *program.words])
        ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)

    vars(fork)["_adopt_state"] = take_on_for_tests
    type.__setattr__(ForkServer, "is_ready", lambda self, _=0.0: is_ready(self, 5.0))
    server.main(sys.argv[1:])


if __name__ == "__main__":
    _become_server()
