"""The actor on a node's share of a job: starts programs there, and passes bytes.

Pickled by value, so that a node's Ray needs no dstrial: standard library only, and Ray inside its methods. It belongs to the
cluster (``lifetime="detached"``) and lives as long as the job's placement group; the master after a killed one finds it again.
When Ray reports that their owner is gone, programs get the end of their input.
"""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

NUM_CALLS = 32
"""How many methods may run at once: one waits for each program's output."""
# Below what Ray sends in the answer itself, 100 KiB (`max_direct_call_object_size`); more would go through its object store.
PIECE_BYTES = 96 * 1000
"""The most that is passed by one call."""
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_SILENT_S = 4.0
_LATE_OUTPUT_S = 2.0
_FULL_PIPE_MS = 1000
_LOOK_S = 1.0
# Which of the node's devices Ray has given to this actor (ray/_private/accelerators).
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR", "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES", "TPU_VISIBLE_CHIPS", "NEURON_RT_VISIBLE_CORES",
)  # fmt: skip


@dataclasses.dataclass
class Output:
    """A program's output; ``exit_code``, a shell's, is None while there may be more."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None


class _Program:
    def __init__(
        self, words: Sequence[str], guard: Sequence[str], environ: Mapping[str, str], job: str
    ) -> None:
        self.job = job
        self.heard_s = time.monotonic()
        self._changed = threading.Condition()
        self._buffers = {"stdout": bytearray(), "stderr": bytearray()}
        self._num_open = 2
        self._code: int | None = None
        self._ended_s = 0.0
        pipes = [os.pipe() for _ in range(5)]
        (stdin, self._stdin), (stdout, out), (stderr, err), (life, self._life), (status, tell) = pipes
        try:
            subprocess.run(
                [*guard, str(life), str(tell), *words],
                stdin=stdin,
                stdout=out,
                stderr=err,
                pass_fds=(life, tell),
                env=environ,
                cwd="/",
                start_new_session=True,
                check=True,
            )
        except BaseException:
            for descriptor in (self._stdin, stdout, stderr, self._life, status):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin, out, err, life, tell):
                os.close(descriptor)
        os.set_blocking(self._stdin, False)
        self._input = threading.Lock()
        self._is_input_over = self._is_forgotten = False
        _in_background(self._take, stdout, "stdout")
        _in_background(self._take, stderr, "stderr")
        _in_background(self._wait, status)

    def _take(self, descriptor: int, name: str) -> None:
        buffer = self._buffers[name]
        while data := os.read(descriptor, _READ_BYTES):
            with self._changed:
                if not self._is_forgotten:
                    buffer += data
                self._changed.notify_all()
                while len(buffer) >= _BUFFER_BYTES and not self._is_forgotten:
                    self._changed.wait()
        os.close(descriptor)
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def _wait(self, status: int) -> None:
        # The guard writes it at the program's end, and ends when all that has come of the program has.
        text = os.read(status, 64)
        with self._changed:
            self._code = int(text or b"137")
            self._ended_s = time.monotonic()
            self._changed.notify_all()
        while os.read(status, 64):
            pass
        os.close(status)
        os.close(self._life)
        self._life = -1

    def read(self, timeout_s: float) -> Output:
        """Return new output as soon as there is any, or how it ended."""
        give_up_at_s = time.monotonic() + timeout_s
        self.heard_s = time.monotonic()
        with self._changed:
            while not any(self._buffers.values()) and not self._is_over():
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, _LATE_OUTPUT_S))
            found = []
            for name in ("stdout", "stderr"):
                buffer = self._buffers[name]
                found.append(bytes(buffer[:PIECE_BYTES]))
                del buffer[:PIECE_BYTES]
            self._changed.notify_all()
            self.heard_s = time.monotonic()
            is_over = not any(found) and self._is_over()
            return Output(found[0], found[1], self._code if is_over else None)

    def _is_over(self) -> bool:
        # What it has left behind may hold its pipes.
        return self._code is not None and (
            not self._num_open or time.monotonic() > self._ended_s + _LATE_OUTPUT_S
        )

    def write(self, data: bytes) -> bool:
        """Write to its input; return whether it accepts more."""
        self.heard_s = time.monotonic()
        with self._input:
            waiting = select.poll()
            waiting.register(self._stdin, select.POLLOUT)
            while data and not self._is_input_over:
                try:
                    data = data[os.write(self._stdin, data) :]
                except BlockingIOError:
                    waiting.poll(_FULL_PIPE_MS)
                    self.heard_s = time.monotonic()
                except OSError:
                    return False
            return not self._is_input_over

    def end_input(self) -> None:
        """Close its input, of which it may have read less than was written."""
        self._is_input_over = True
        with self._input:
            if self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    def forget(self) -> None:
        """Close its input, and drain its output so that it never blocks."""
        with self._changed:
            self._is_forgotten = True
            for buffer in self._buffers.values():
                buffer.clear()
            self._changed.notify_all()
        self.end_input()

    @property
    def is_guarded(self) -> bool:
        """Whether any of its processes is left."""
        return self._life >= 0


class NodeActor:
    """Programs on a node: an actor of Ray's, called from several threads.

    ``guard`` is the source of ``dstrial.ray.guard``; ``ends_with_daemon`` ends this process with its parent, Ray's daemon of
    the node.
    """

    def __init__(self, guard: str, *, ends_with_daemon: bool = False) -> None:
        self._guard = guard
        self._programs: dict[int, _Program] = {}
        self._guarded: list[_Program] = []
        self._num_started = 0
        self._is_watching = self._is_asking = False
        self._lock = threading.Lock()
        if ends_with_daemon:
            _in_background(_end_with, os.getppid())

    def start(self, words: Sequence[str], job: str) -> int:
        """Start a program for Ray's job of this hexadecimal id; return its number."""
        guard = [sys.executable, "-I", "-S", "-c", self._guard]
        program = _Program(words, guard, environment_of(_login_environment(), os.environ), job)
        with self._lock:
            self._num_started += 1
            self._programs[self._num_started] = program
            self._guarded.append(program)
            if not self._is_watching:
                self._is_watching = True
                _in_background(self._watch)
            return self._num_started

    def read(self, number: int, timeout_s: float) -> tuple[bytes, bytes, int | None]:
        """Return what a program has printed, and how it ended."""
        output = self._programs[number].read(timeout_s)
        if output.exit_code is not None:
            self._programs.pop(number, None)
        return output.stdout, output.stderr, output.exit_code

    def write(self, number: int, data: bytes) -> bool:
        return self._programs[number].write(data)

    def end_input(self, number: int) -> None:
        self._programs[number].end_input()

    def forget(self, number: int) -> None:
        """Abandon a program: close its input, and drain its output."""
        program = self._programs.pop(number, None)
        if program is not None:
            program.forget()

    def _watch(self) -> None:
        """Abandon programs whose owner is gone; a silent one may be behind a cut cable."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                self._guarded = [one for one in self._guarded if one.is_guarded]
                if not self._guarded:
                    self._is_watching = False
                    return
                programs = list(self._programs.items())
            silent = [one for one in programs if time.monotonic() > one[1].heard_s + _SILENT_S]
            if silent and not self._is_asking:
                # In a thread of its own: behind a cut cable there is no answer for long.
                self._is_asking = True
                _in_background(self._forget_dead, silent)

    def _forget_dead(self, silent: Sequence[tuple[int, _Program]]) -> None:
        dead = _dead_jobs()
        for number, program in silent:
            if program.job in dead:
                self.forget(number)
        self._is_asking = False


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


def _dead_jobs() -> set[str]:
    """Return Ray's jobs that are over; empty if its head does not answer."""
    from ray._private import state

    try:
        return {str(job["JobID"]) for job in state.jobs() if job.get("IsDead")}
    except Exception:  # noqa: BLE001  # whatever it is, nobody is known to be gone
        return set()


def _end_with(daemon: int) -> None:
    """End this process with Ray's daemon.

    Ray leaves its workers behind, whose resources others may have.
    """
    while os.getppid() == daemon:
        time.sleep(_LOOK_S)
    os._exit(1)


def _in_background(run: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()
