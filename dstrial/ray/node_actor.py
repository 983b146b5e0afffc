"""The Ray actor on a job's node: start the agent, forward its input and output.

dstrial's agent is the program that runs a trial's ranks on a node. The actor is pickled by value and uses only the standard
library, so the node needs no dstrial. The actor is detached (``lifetime="detached"``): it lives as long as the job's placement
group, and a restarted master finds it by name. The actor closes the agent's input only on request. So until its lease ends, the
agent survives the loss of Ray or of the bridge, the process that connects the master to Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

NUM_CALLS = 32  # maximum of concurrent method calls; each running program uses one, a waiting ``read``
# Maximum size of the data in a call. Ray puts answers above 100 KiB (`max_direct_call_object_size`) into its object store.
PIECE_BYTES = 96 * 1000
_TRAILING_OUTPUT_S = 2.0  # timeout of output after a program's end: its descendants may hold its pipes open
_FULL_PIPE_POLL_MS = 1000  # interval of checks for `end_input` while a program does not read its input
_PARENT_POLL_S = 1.0
_NOT_STARTED = 127  # exit code if a program cannot be started, as in a shell
# Variables that list the devices that Ray has assigned to this actor (ray/_private/accelerators).
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR", "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES", "TPU_VISIBLE_CHIPS", "NEURON_RT_VISIBLE_CORES",
)  # fmt: skip


class _Program:
    """A child process of the actor and its pipes. Thread-safe."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            words,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            cwd="/",
            start_new_session=True,
        )
        _reset_priority(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._outputs = [self._process.stdout, self._process.stderr]
        os.set_blocking(self._stdin.fileno(), False)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._is_input_over = False

    def read(self, timeout_s: float) -> tuple[bytes, bytes, int | None]:
        """Wait up to ``timeout_s`` for output; return (stdout, stderr, exit code).

        Both outputs are empty after a timeout. The exit code is None until the program has ended and its output is read.
        """
        found = [b"", b""]
        with self._reading:
            poll = select.poll()
            for output in self._outputs:
                if not output.closed:
                    poll.register(output, select.POLLIN)
            ready: set[int] = set()
            if all(output.closed for output in self._outputs):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
            else:
                ready = {descriptor for descriptor, _ in poll.poll(1000 * min(timeout_s, _TRAILING_OUTPUT_S))}
            for index, output in enumerate(self._outputs):
                if not output.closed and output.fileno() in ready:
                    found[index] = os.read(output.fileno(), PIECE_BYTES)
                    if not found[index]:
                        output.close()
            # After the poll, so that all output of an ended program has been read.
            code = None if ready else self._process.poll()
        return found[0], found[1], code if code is None or code >= 0 else 128 - code

    def write(self, data: bytes) -> bool:
        """Write all of ``data`` to the program's input; return False if it is closed."""
        with self._writing:
            waiting = select.poll()
            if not self._stdin.closed:
                waiting.register(self._stdin, select.POLLOUT)
            while data and not self._is_input_over:
                try:
                    data = data[os.write(self._stdin.fileno(), data) :]
                except BlockingIOError:
                    waiting.poll(_FULL_PIPE_POLL_MS)
                except OSError:
                    return False
            return not self._is_input_over

    def end_input(self) -> None:
        """Close the program's input; a blocked ``write`` returns."""
        self._is_input_over = True
        with self._writing:
            self._stdin.close()

    def drain(self) -> None:
        """Discard output until the program ends, so that the program never blocks."""
        while self.read(_TRAILING_OUTPUT_S)[2] is None:
            pass
        self.close()

    def close(self) -> None:
        self.end_input()
        for output in self._outputs:
            output.close()


class NodeActor:
    """A Ray actor that runs programs on a node. Thread-safe.

    If ``is_worker``, the actor's process exits when its parent, Ray's daemon on the node, has ended.
    """

    def __init__(self, *, is_worker: bool = False) -> None:
        self._programs: dict[int, _Program] = {}
        self._not_started: dict[int, bytes] = {}  # number -> error message
        self._numbers = itertools.count(1)
        if is_worker:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def start(self, words: Sequence[str]) -> int:
        """Start a program; return the ``number`` by which other methods identify it.

        If the start fails, ``read`` returns the error as stderr, and exit code 127.
        """
        number = next(self._numbers)
        try:
            self._programs[number] = _Program(words, environment_of(_login_environment(), os.environ))
        except OSError as error:
            self._not_started[number] = f"{words[0]}: {error.strerror}\n".encode()
        return number

    def read(self, number: int, timeout_s: float) -> tuple[bytes, bytes, int | None]:
        """Wait up to ``timeout_s`` for output; return (stdout, stderr, exit code).

        The exit code is None while the program runs. It is 128 + N after signal N, and 127 if the program could not be
        started, as in a shell. Do not call ``read`` after an exit code.
        """
        if number in self._not_started:
            return b"", self._not_started.pop(number), _NOT_STARTED
        program = self._programs[number]
        found = program.read(timeout_s)
        if found[2] is not None:
            self._programs.pop(number, None)
            program.close()
        return found

    def write(self, number: int, data: bytes) -> bool:
        return number in self._programs and self._programs[number].write(data)

    def end_input(self, number: int) -> None:
        if number in self._programs:
            self._programs[number].end_input()

    def abandon(self, number: int) -> None:
        """Discard the output of program ``number`` until the program ends. Idempotent.

        The program's input stays open. dstrial's agent, which then gets no more acknowledgements, ends with its lease.
        """
        program = self._programs.pop(number, None)
        if program is not None:
            threading.Thread(target=program.drain, daemon=True).start()


def environment_of(login: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that the actor starts.

    Args:
        login: the environment of Ray's daemon on the node. Ray's own variables and preloaded allocator are removed.
        own: the actor's environment, of which only variables that list devices are added. Ray sets other variables in it, such
            as ``OMP_NUM_THREADS``, which must not apply to the program.
    """
    found = {name: value for name, value in login.items() if not name.startswith("RAY_")}
    loaded = [path for path in found.pop("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    if kept := [path for path in loaded if "/ray/core/" not in path]:
        found["LD_PRELOAD"] = ":".join(kept)
    found.update({name: own[name] for name in _DEVICES if own.get(name)})
    return found


def _login_environment() -> dict[str, str]:
    """Return the environment of this process's parent, Ray's daemon on the node."""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:  # noqa: PTH123  # as short as that
            pairs = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def _reset_priority(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("0")


def _end_with(daemon: int) -> None:
    """Exit this process when its parent, Ray's daemon with pid ``daemon``, has ended.

    Ray itself does not end detached actors when the daemon ends, although it may reserve their resources for other jobs.
    """
    while os.getppid() == daemon:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
