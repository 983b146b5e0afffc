"""The process of dry runs: ``python -m dstrial.engine.dryrun REQUEST ANSWER``.

Several requests are answered in forks of one process that has imported everything; requests with the same user code are forks
of a process that has imported this code, too, if a fork has what an import leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import logging
import os
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]  # no stubs are installed

from dstrial.engine.dryrun.values import PARENT_VARIABLE, DryRunRequest, DryRunResult
from dstrial.engine.host_memory import available_bytes
from dstrial.errors import DstrialError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARE_OF_FREE = 0.9


def main(request_path: str, answer_path: str) -> int:
    """Write a result, or ``{"error": {kind, message, place}}`` and return 1."""
    request = _read(request_path)
    sys.path[:0] = request.module_paths
    from dstrial.engine.dryrun.measure import measure

    return _answer(request, answer_path, measure)


def _read(request_path: str) -> DryRunRequest:
    return DryRunRequest.from_json(json.loads(Path(request_path).read_text(encoding="utf-8")))


def _answer(
    request: DryRunRequest, answer_path: str, measure: Callable[[DryRunRequest], DryRunResult]
) -> int:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    unsupported = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
    answer: dict[str, Any]
    limit_bytes = limit_memory() if request.is_real else None
    try:
        answer = measure(request).to_json()
    except Exception as error:  # noqa: BLE001  # this is the process's main: what a user's code raises is the answer
        traceback.print_exc()
        place = user_place(error)
        at = "" if place is None else f" at {place}"
        is_unsupported = isinstance(error, (*unsupported, NotImplementedError))
        said = str(error).strip() or type(error).__name__
        message = (
            f"the dry run is stopped{at} by {type(error).__name__}: {said}; expected code that runs "
            f"{'with real' if request.is_real else 'without values of'} tensors. "
            f"{'Correct that line.' if request.is_real else 'Have one real batch measured instead, or change that line.'}"
        )
        if isinstance(error, DstrialError):  # which says itself what to do
            message = f"the dry run is stopped{at}: {said}"
        if limit_bytes is not None and _is_out_of_memory(error):
            message = (
                f"one real batch{at} needs more than the {limit_bytes / 2**30:.3g} GiB of memory that this machine has free; "
                "expected it to fit. Describe it on a machine with more memory, or change what fake tensors cannot do."
            )
        answer = {
            "error": {
                "kind": "unsupported" if is_unsupported else "error",
                "message": message,
                "place": place,
            }
        }
    partial = Path(answer_path + ".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(answer_path)
    return 1 if "error" in answer else 0


def limit_memory(free_bytes: int | None = None) -> int | None:
    """Make allocations fail here before the machine must kill a process for memory.

    Returns the bytes that this process may have (by default, what the machine has free); None if unknown.
    """
    free = available_bytes() if free_bytes is None else free_bytes
    if free is None:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(_SHARE_OF_FREE * free)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def main_of_many(paths: Sequence[str], num_parallel: int) -> int:
    """Answer several requests, each in a fork; one that dies leaves no answer."""
    importlib.import_module("dstrial.engine.dryrun.imported_ahead")
    pairs = [(paths[idx], paths[idx + 1]) for idx in range(0, len(paths), 2)]
    alone: list[tuple[str, str]] = []
    while pairs:
        first = _read(pairs[0][0])
        alike = [pair for pair in pairs if _read(pair[0]).is_begun_like(first)]
        pairs = [pair for pair in pairs if pair not in alike]
        if len(alike) == 1 or not _ends_well(_fork(functools.partial(_answer_together, alike, num_parallel))):
            alone += [pair for pair in alike if not Path(pair[1]).exists()]
    _run_all([functools.partial(main, *pair) for pair in alone], num_parallel)
    return 0


def _answer_together(pairs: Sequence[tuple[str, str]], num_parallel: int) -> int:
    """Import the user's code once, and answer each request in a fork.

    Returns 0; 1 if a fork would not have what the import has left.
    """
    from dstrial.engine.dryrun.measure import begun

    requests = [_read(path) for path, _ in pairs]
    sys.path[:0] = requests[0].module_paths
    process = psutil.Process()
    num_files = process.num_fds()
    with begun(requests[0]) as measure:
        # A fork has one thread; what it reads of an open file its siblings do not read any more.
        if process.num_threads() > 1 or process.num_fds() != num_files:
            return 1
        _run_all(
            [
                functools.partial(_answer, request, answer_path, measure)
                for request, (_, answer_path) in zip(requests, pairs, strict=True)
            ],
            num_parallel,
        )
    return 0


def _run_all(calls: Sequence[Callable[[], int]], num_parallel: int) -> None:
    waiting = list(calls)
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < num_parallel:
            running.add(_fork(waiting.pop(0)))
        ended, _ = os.wait()
        running.discard(ended)


def _fork(call: Callable[[], int]) -> int:
    """Return the process id of a fork, which ends with the call or with this process."""
    sys.stdout.flush()
    own_pid = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with_parent(own_pid)
        _exit(call())
    except BaseException:  # noqa: BLE001  # it must not go on as its parent
        traceback.print_exc()
        _exit(1)


def _ends_well(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return status == 0


def end_with_parent(parent_pid: int) -> None:
    """End this process when its parent dies, as nobody else keeps its deadline."""
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # DeepSpeed's exit handlers call compiled ops that are not there.
    os._exit(status)


def user_place(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame of user code in an error, or None."""
    found = None
    frame = error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        is_of_library = "site-packages" in file.parts or not _NOT_USERS.isdisjoint(file.parents)
        if not is_of_library and not str(file).startswith("<"):
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


_NOT_USERS = frozenset(
    {
        Path(__file__).resolve().parents[2],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    }
)

if __name__ == "__main__":
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
    words = sys.argv[1:]
    if words[0] == "--parallel":
        _exit(main_of_many(words[2:], int(words[1])))
    _exit(main(*words))
