"""Start programs as forks of a process that has imported torch, DeepSpeed and dstrial.

A new process imports them for 2 to 4 s of CPU time, a fork for none. ``run`` and ``Popen`` stand for those of ``subprocess``.
Masters that tests start use the same process, by a variable of theirs, and so do launchers for their ranks.

``TEST_FORKS=0`` has every program start as a new process. Not for tests of how processes are started.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import dstrial
from dstrial.determined_imports import SITE
from dstrial.fork_server.client import SHARED_VARIABLE, WITH_COPIES, ForkedPopen, ForkServer, OwnForkServer
from dstrial.fork_server.key import PATH_VARIABLE, import_places, is_free
from dstrial.master.backends.fork_servers import IMPORTS

IMPORTED_AHEAD = (
    *IMPORTS,
    "zmq",  # of several ranks under Determined's names
    "sklearn.datasets",
    "torch.utils.tensorboard",  # chief's
    "torch.fx.experimental.symbolic_shapes",  # where backward is given gradients: pipelines, recomputed layers
    # of commands that tests give their masters
    "dstrial.cli.app",
    "dstrial.cli.up",
    "dstrial.cli.down",
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
    "transformers.trainer",
    "accelerate.data_loader",
)
"""What programs of tests import, sooner or later."""
SWITCH = "TEST_FORKS"
"""A variable: 0 has every program be a new process, as users have them."""
# Python and the libraries read these when they start: a program with others is a new process.
_READ_AT_START = ("PYTHON", "LD_", "DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCHDYNAMO_", "TORCH_LOGS")
_VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
# A fork does for the second what Python does at its start, but that ``signal.getsignal`` knows nothing of it.
_FREE_FOR_TESTS = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
# In which masters of tests, and what they run, differ.
_FREE = (
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "HOME",
    "PATH",
    "PYTHONUNBUFFERED",
    # read when an operator is built
    "TORCH_EXTENSIONS_DIR",
    # of configs; nothing that is imported reads them
    "FAILED_ONCE",
    "FROM_CONFIG",
    "HF_HUB_OFFLINE",
    "KILL_AT",
    "KILL_MARKER",
    "NCCL_DEBUG",
    # of `dstrial run`, against bars; tqdm reads its own when it is imported, so that it draws in a fork
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "TQDM_DISABLE",
)
# What starts masters, launchers and dry runs, which are then forks of what it has been before it began.
_COPIED = (*WITH_COPIES, "dstrial", "dstrial.cli", "dstrial.dsat", "determined.pytorch.dsat")
_ROOT = str(Path(dstrial.__file__).parents[1])
servers: set[int] = set()
"""The process that is forked, once there is one; it ends with this process."""


class Popen(ForkedPopen):
    """``subprocess.Popen`` whose ``[sys.executable, "-m", ...]`` or ``[sys.executable, FILE, ...]`` is a fork."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        variables = os.environ if options.get("env") is None else options["env"]
        names = {*os.environ, *variables}
        free = {
            *(name for name in names if is_free(name) or not name.startswith(_READ_AT_START)),
            *_FREE_FOR_TESTS,
        }
        words = list(map(os.fspath, args))
        # With options the interpreter itself is another one.
        may_fork = words[0] == sys.executable and (words[1] == "-m" or not words[1].startswith("-"))
        server = fork_server() if may_fork and os.environ.get(SWITCH) != "0" else None
        super().__init__(server, words, free=free, **options)


class ServerOfDryRuns:
    """Have dry runs that this process starts be forks, too, where they see no other files than it does.

    Args:
        own: what starts a server for them, which imports for 5 s what there is already.
    """

    def __init__(self, own: OwnForkServer) -> None:
        self._own = own

    def get(self, environment: Mapping[str, str], timeout_s: float) -> Any:
        """Stand for the function of ``own``."""
        places = [place for place in import_places(environment) if place != SITE]
        if places == [_ROOT] and os.environ.get(SWITCH) != "0":
            server = fork_server()
            if not server.why_not(environment, {PATH_VARIABLE}):
                return _WithRoot(server)
        return self._own.get(environment, timeout_s)


class _WithRoot:
    """A server of which programs may be forks that have the repository in ``PYTHONPATH``: it has imported from there."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def start_program(self, *given: Any, free: Collection[str] = (), **options: Any) -> int:
        return self._server.start_program(*given, free={*free, PATH_VARIABLE}, **options)


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
    server = _started()
    while not server.is_ready(60.0):
        pass
    return server


def share() -> None:
    """Let masters that this process starts use the process that is forked."""
    if os.environ.get(SWITCH) != "0":
        _started()
        os.environ[SHARED_VARIABLE] = str(_listener().getsockname())


@functools.cache
def _listener() -> socket.socket:
    # /tmp: the path of a socket may have 107 bytes.
    directory = tempfile.TemporaryDirectory(prefix="test-forks-", dir="/tmp")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(directory.name) / "socket"))
    listener.listen()
    atexit.register(directory.cleanup)
    return listener


@functools.cache
def _started() -> ForkServer:
    server = ForkServer.start(
        {**os.environ, **_VARIABLES},
        IMPORTED_AHEAD,
        log=Path(os.devnull),
        listener=_listener(),
        free=_FREE,
        copied=_COPIED,
    )
    atexit.register(server.close)
    servers.add(server.pid or 0)
    return server
