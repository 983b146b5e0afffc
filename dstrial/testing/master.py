"""Run dstrial's master in a test, with its own state directory, login and port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master.client import Client
from dstrial.master.login import new_token, read_credentials
from dstrial.master.state_directory import MasterRecord, StateDirectory, StateInUseError

_DEADLINE_S = 120.0  # default timeout of a command


@dataclasses.dataclass(frozen=True, slots=True)
class MasterForTest:
    """A dstrial master for a test; methods run commands against this master.

    Attributes:
        state: the master's state directory.
        env: environment variables with which ``det``, Determined's SDK and ``dstrial`` connect to this master.
        up_arguments: arguments of ``dstrial up``, which a restart uses again.
    """

    state: StateDirectory
    env: Mapping[str, str]
    up_arguments: tuple[str, ...]

    @property
    def record(self) -> MasterRecord:
        """Address, pid, start time and ids of the running or, if none runs, last master.

        Raises:
            MasterError: the master was never started.
        """
        record = self.state.read_record()
        if record is None:
            raise MasterError(
                f"{self.state.record_path} is missing; expected the record of a master. Start it."
            )
        return record

    @property
    def address(self) -> str:
        """The master's URL."""
        return self.record.address

    def client(self, username: str = "determined") -> Client:
        """Log in as a user and return a REST client of this master."""
        return Client(self.address, new_token(self.record, username))

    def password(self, username: str = "determined") -> str:
        """Return a user's initial password; "" if the user has a blank password."""
        return str(read_credentials(self.state).get(username, ""))

    def dstrial(
        self, *arguments: str, cwd: Path | None = None, deadline_s: float = _DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``dstrial`` command against this master; the exit code is not checked."""
        return _run([sys.executable, "-m", "dstrial.cli", *arguments], self.env, deadline_s, cwd)

    def det(
        self, *arguments: str, cwd: Path | None = None, deadline_s: float = _DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run ``det`` against this master, logged in; the exit code is not checked."""
        return _run([sys.executable, "-m", "determined.cli", *arguments], self.env, deadline_s, cwd)

    def up(self) -> MasterRecord:
        """Restart the master on the same port.

        Raises:
            MasterError: the master does not start; the message is the command's output.
        """
        ended = self.dstrial("up", *self.up_arguments, "--port", str(self.record.port))
        if ended.returncode != 0:
            raise MasterError(ended.stdout + ended.stderr)
        return self.record

    def kill(self) -> None:
        """Kill the master with SIGKILL; wait until its state directory is free.

        Its trials continue to run.

        Raises:
            StateInUseError: a process still uses the directory after two minutes.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.record.pid, signal.SIGKILL)
        give_up_at_s = time.monotonic() + _DEADLINE_S
        while True:
            try:
                with self.state.lock():
                    return
            except StateInUseError:
                if time.monotonic() > give_up_at_s:
                    raise
            time.sleep(0.01)


@contextlib.contextmanager
def master_for_test(
    directory: Path,
    *,
    num_slots: int = 2,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[MasterForTest]:
    """Run a master inside the block; kill its trials at the end.

    Args:
        directory: an existing directory for all files of the master.
        num_slots: number of slots of the master.
        options: further arguments of ``dstrial up``.
        env: further environment variables, for the master and for commands against it.

    Raises:
        MasterError: the master does not start or stop; the message is the command's output.
    """
    state = StateDirectory(directory / "state")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DSTRIAL_", "DET_")) and name != "PYTEST_CURRENT_TEST"
    }
    variables = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_STATE_DIR": str(state.path),
        "XDG_CONFIG_HOME": str(directory / "config"),
        **(env or {}),
    }
    arguments = ("--slots", str(num_slots), *options)
    started = _run(
        [sys.executable, "-m", "dstrial.cli", "up", *arguments, "--port", "0"], variables, _DEADLINE_S
    )
    if started.returncode != 0:
        raise MasterError(started.stdout + started.stderr + _log_of(state))
    record = state.read_record()
    assert record is not None
    master = MasterForTest(state, {**variables, "DET_MASTER": record.address}, arguments)
    try:
        yield master
    finally:
        ended = master.dstrial("down", "--now")
        if ended.returncode != 0:
            master.kill()
            raise MasterError(ended.stdout + ended.stderr + _log_of(state))


def _run(
    command: Sequence[str], env: Mapping[str, str], deadline_s: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _log_of(state: StateDirectory) -> str:
    return state.log_path.read_text(errors="replace") if state.log_path.exists() else ""
