"""Starts a program on a node of Ray's, and ends its processes with the job.

Standard library only. Ray kills an actor without a word when its placement group is removed, and leaves the actor's children.
So a guard, which is none of Ray's, starts the program: a pipe from the actor tells it that the actor is gone, and orphans of
the program become its children (``PR_SET_CHILD_SUBREAPER``). The actor's child only waits for the exit code: Ray may kill it.
Sent as text, with a descriptor as the first argument and the program's words after it.
"""

# pathlib would take 5 ms of each start.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_KILL_AGAIN_S = 0.05  # between kills while processes still fork
_NOT_STARTED = 127
_KILLED = 137  # a guard that is killed tells no exit code


def main(words: list[str]) -> None:
    """Run a program and all that it starts; end with its exit code, a shell's.

    ``words``: a descriptor whose end is the actor's; the program.
    """
    life = int(words[0])
    ended, status = os.pipe()
    if os.fork():
        os.closerange(0, 3)  # the program's alone: their end is to be seen when it ends
        os.close(status)
        os._exit(int(os.read(ended, 8) or _KILLED))
    os.set_inheritable(life, False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    is_told_to_end: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: is_told_to_end.append(1))
    # Ray's workers are nice and the first to go when memory is short; what trains is neither, where that may be changed.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("0")
    program = os.fork()
    if program == 0:
        _become(words[1:])
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    while not is_told_to_end:
        ready, _, _ = select.select([life, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            if not _reap(program, status):
                return
        if life in ready:
            break
    while _reap(program, status):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_AGAIN_S)


def _become(words: list[str]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    try:
        os.execvp(words[0], words)  # noqa: S606  # no shell is meant
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_NOT_STARTED)


def _reap(program: int, status: int) -> bool:
    """Reap ended children; return whether any child is left."""
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == program:
            code = os.waitstatus_to_exitcode(ended)
            with contextlib.suppress(OSError):  # the actor's child is gone
                os.write(status, b"%d" % (code if code >= 0 else 128 - code))


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may have any characters.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        born = children.get(waiting.pop(), [])
        found += born
        waiting += born
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
