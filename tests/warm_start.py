"""Start programs as forks of a process that has imported torch and DeepSpeed.

A fork saves the imports' 2 to 4 s of CPU time. ``run_command`` and ``Popen`` replace ``run`` and ``Popen`` of ``subprocess``.
Executed as a program, this file is the fork server, whose forks start masters, launchers and fork servers as forks, too.

``TEST_FORKS=0`` starts every program as a new process. Do not use this module to test how processes are started.
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
from dstrial.fork_server import PATH_VARIABLE, client, differing, fork, pythonpath_of, server
from dstrial.fork_server.client import ForkRefusedError, ForkServer
from dstrial.fork_server.fork import Program

_IMPORTING_PYARROW = ("sklearn.datasets", "transformers.trainer")
if (
    importlib.util.find_spec("pyarrow") is not None
):  # a dependency of ``datasets``; starts a thread, so that forking is unsafe
    _IMPORTING_PYARROW = ()
IMPORTED_AHEAD = (
    "dstrial.launch.imported_ahead",
    "zmq",  # used by several ranks under Determined's API
    *_IMPORTING_PYARROW,
    "torch.utils.tensorboard",  # used by rank 0
    "torch.fx.experimental.symbolic_shapes",  # used by backward with given gradients: pipelines, activation checkpointing
    # modules of commands that tests run on masters
    "dstrial.cli.app",
    "dstrial.cli.up",
    "dstrial.cli.master",
    "dstrial.cli.status",
    "dstrial.master.server",
    # modules that a serving master imports
    "dstrial.master.proxy",
    "dstrial.master.backends.hosts.backend",
    "dstrial.master.http.connection",
    "dstrial.master.scheduler.scheduler",
    "dstrial.master.webhooks.delivery",
    *(
        f"dstrial.master.api.{path.stem}"
        for path in Path(dstrial.__file__).parent.glob("master/api/[a-z]*.py")
    ),
    # All of determined.cli but ``cli.cli``, which binds sys.argv at import.
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
"""Modules that programs of tests import."""
SWITCH = "TEST_FORKS"
"""Environment variable: 0 starts every program as a new process."""
# Prefixes of variables that are read at start or import: a program with other values needs a new process.
_READ_AT_START = ("PYTHON", "LD_", "DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCHDYNAMO_", "TORCH_LOGS", "TQDM_")
_SET_ANEW = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")  # variables that a fork applies itself
_VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
_ROOT = str(Path(dstrial.__file__).parents[1])
_LAUNCHERS = {"dstrial.launch", "determined.launch.deepspeed"}
# Programs that start Python processes; as forks they get a spare (idle fork) for these.
_STARTERS = {"dstrial", "dstrial.cli", "dstrial.dsat", "determined.pytorch.dsat", "dstrial.master.server"}
_STARTERS |= {"dstrial.dsat.search_trial", *_LAUNCHERS}
_POPEN_OPTIONS = list(inspect.signature(subprocess.Popen).parameters)[1:]
servers: set[int] = set()
"""Process ids of fork servers that end with this process."""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the differing variables that prevent a fork."""
    environments = []
    for each in (one, other):
        places = [place for place in pythonpath_of(each) if place not in (SITE, _ROOT)]
        environments.append({**each, PATH_VARIABLE: os.pathsep.join(places)})
    names = differing(*environments)
    return [name for name in names if name.startswith(_READ_AT_START) and name not in _SET_ANEW]


class ForkedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks Python programs from ``server`` or a spare.

    A spare is this process's idle fork, if ``server`` is None. If a program cannot be forked, ``told`` is called with the
    reason, and the program starts as a new process.
    """

    def __init__(
        self,
        server: ForkServer | None,
        args: Sequence[str],
        *,
        told: Callable[[str], object] = lambda _: None,
        **options: Any,
    ) -> None:
        self._server, self._told = server, told
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(execute).bind(*given).arguments
        words = (
            [os.fspath(word) for word in asked["args"]] if isinstance(asked["args"], (list, tuple)) else [""]
        )
        # Interpreter options need a new process.
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
                self.pid = self._server.start(program, files).pid
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
    """Replaces ``subprocess.Popen`` in forks: forks Python programs from the spare."""

    def __init__(self, args: Any, *given: Any, **options: Any) -> None:
        options |= dict(zip(_POPEN_OPTIONS, given, strict=False))
        super().__init__(None, args, **options)


class Popen(ForkedPopen):
    """``subprocess.Popen`` that forks ``python -m MODULE`` and ``python FILE``."""

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
    """Run ``python -m ARGUMENTS``, capture output; ``is_merged``: stderr to stdout.

    Raises:
        subprocess.TimeoutExpired: the program was killed after ``timeout`` seconds.
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
    """Like ``subprocess.run``, but fork Python programs.

    Raises:
        subprocess.TimeoutExpired: the command was killed after ``timeout`` seconds.
        subprocess.CalledProcessError: ``check`` is set and the exit code is not 0.
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
    """Return the fork server, after its imports."""
    started = share()
    while not started.is_ready(60.0):
        pass
    return started


@functools.cache
def share() -> ForkServer:
    """Start the fork server, once per process, without waiting for its imports."""
    started = ForkServer(
        {**os.environ, **_VARIABLES}, IMPORTED_AHEAD, log=Path(os.devnull), program=[__file__]
    )
    atexit.register(started.close)
    servers.add(started.pid)
    return started


def _become_server() -> None:
    """Run the fork server; forks inherit the changes made here."""
    from dstrial.master.backends import fork_servers

    vars(fork)["differing"] = vars(client)["differing"] = _differing
    vars(subprocess)["Popen"] = SparePopen
    # Unlike users' masters, masters of tests also fork scripts and the first trial, to save their imports.
    vars(fork_servers)["trains_trial_class"] = lambda words: bool(_LAUNCHERS.intersection(words[:2]))
    is_ready, take_on = ForkServer.is_ready, vars(fork)["_adopt_state"]
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])

    def take_on_for_tests(program: Program, *given: Any) -> None:
        take_on(program, *given)
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        # Tests find processes by /proc/PID/cmdline, which shows this memory of the executed program (proc(5)).
        shown = b"\0".join(word.encode() for word in [sys.executable, *program.words])
        ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)

    vars(fork)["_adopt_state"] = take_on_for_tests
    type.__setattr__(ForkServer, "is_ready", lambda self, _=0.0: is_ready(self, 5.0))
    server.main(sys.argv[1:])


if __name__ == "__main__":
    _become_server()
