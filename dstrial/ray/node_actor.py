"""The actor on a job's node: starts the agent there, and passes its bytes.

Pickled by value, so that a node's Ray needs no dstrial: standard library only. The actor belongs to the cluster
(``lifetime="detached"``) and lives as long as the job's placement group; the master after a killed one finds it again. It ends a
program's input only when its caller asks for that: if Ray or the caller is gone, the agent's lease counts.
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

NUM_CALLS = 32  # methods that may run at once: one waits for each program's output
# Below what Ray sends in the answer itself, 100 KiB (`max_direct_call_object_size`); more would go through its object store.
PIECE_BYTES = 96 * 1000  # the most that one call passes
_TRAILING_OUTPUT_S = 2.0  # for output after a program's end: its descendants may hold its pipes
_FULL_PIPE_POLL_MS = 1000  # between checks whether the input of a program that does not read is to be closed
_PARENT_POLL_S = 1.0
_NOT_STARTED = 127  # exit code of a program that is not there, a shell's
# Which of the node's devices Ray has given to this actor (ray/_private/accelerators).
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR", "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES", "TPU_VISIBLE_CHIPS", "NEURON_RT_VISIBLE_CORES",
)  # fmt: skip


class _Program:
    """A child of the actor and its pipes; any thread may call its methods."""

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
        """Return new output as soon as there is any, or the exit code at its end."""
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
        """Write to its input; return whether it accepts more."""
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
        """Close its input, of which it may have read less than was written."""
        self._is_input_over = True
        with self._writing:
            self._stdin.close()

    def drain(self) -> None:
        """Discard the output until the program ends, so that it never blocks."""
        while self.read(_TRAILING_OUTPUT_S)[2] is None:
            pass
        self.close()

    def close(self) -> None:
        """Release an ended program's pipes."""
        self.end_input()
        for output in self._outputs:
            output.close()


class NodeActor:
    """Programs on a node: an actor of Ray's, called from several threads.

    In a worker of Ray's (``is_worker``) this process ends with its parent, Ray's daemon of the node.
    """

    def __init__(self, *, is_worker: bool = False) -> None:
        self._programs: dict[int, _Program] = {}
        self._not_started: dict[int, bytes] = {}  # messages by number
        self._numbers = itertools.count(1)
        if is_worker:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def start(self, words: Sequence[str]) -> int:
        """Start a program; return its number."""
        number = next(self._numbers)
        try:
            self._programs[number] = _Program(words, environment_of(_login_environment(), os.environ))
        except OSError as error:
            self._not_started[number] = f"{words[0]}: {error.strerror}\n".encode()
        return number

    def read(self, number: int, timeout_s: float) -> tuple[bytes, bytes, int | None]:
        """Return what a program has printed, and its exit code, a shell's, at the end."""
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
        """Discard a program's output from now on. Idempotent.

        Its input stays open: without heartbeats an agent ends at the end of its lease.
        """
        program = self._programs.pop(number, None)
        if program is not None:
            threading.Thread(target=program.drain, daemon=True).start()


def environment_of(login: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables: Ray's at its start, and the actor's devices. Pure.

    Ray's processes have variables besides, as ``OMP_NUM_THREADS``, which mean the actor, and an allocator of Ray's own.
    """
    found = {name: value for name, value in login.items() if not name.startswith("RAY_")}
    loaded = [path for path in found.pop("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    if kept := [path for path in loaded if "/ray/core/" not in path]:
        found["LD_PRELOAD"] = ":".join(kept)
    found.update({name: own[name] for name in _DEVICES if own.get(name)})
    return found


def _login_environment() -> dict[str, str]:
    """Return the variables of our parent, Ray's daemon of this node."""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:  # noqa: PTH123  # as short as that
            pairs = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def _reset_priority(pid: int) -> None:
    """Undo Ray's ``nice 15`` and OOM score of its workers, if permitted."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("0")


def _end_with(daemon: int) -> None:
    """End this process with Ray's daemon.

    Ray leaves its workers behind, whose resources others may have.
    """
    while os.getppid() == daemon:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
