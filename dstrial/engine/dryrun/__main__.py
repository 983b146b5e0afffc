"""Run the dry runs of the given request files, each in a fork.

``python -m dstrial.engine.dryrun NUM_PARALLEL REQUEST ANSWER ...``.

All requests run in forks of one process that has imported torch and DeepSpeed. Requests with the same user code also share the
import of this code, unless the import leaves a thread or an open file.
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

from dstrial.engine.dryrun.values import PARENT_VARIABLE, DryRunRequest, ModelTrace
from dstrial.engine.host_memory import available_bytes
from dstrial.errors import DstrialError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARE_OF_FREE = 0.9  # limit of a dry run with a real batch, as a fraction of the free memory
_LIBRARY_DIRECTORIES = frozenset(
    {
        Path(__file__).resolve().parents[2],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    }
)
_Pair = tuple[DryRunRequest, Path]  # a request and the file for its answer


def main(num_parallel: int, paths: Sequence[str]) -> None:
    """Run each request in a fork, which writes its answer file.

    At most ``num_parallel`` forks run at once. ``paths`` alternates request and answer files. An answer is a ``ModelTrace`` in
    JSON, or ``{"error": {kind, message, place}}``. A fork that dies leaves no answer file.
    """
    importlib.import_module("dstrial.engine.dryrun.imported_ahead")
    requests = [DryRunRequest.from_json(json.loads(Path(path).read_text("utf-8"))) for path in paths[::2]]
    pairs = list(zip(requests, map(Path, paths[1::2]), strict=True))
    alone: list[_Pair] = []
    while pairs:
        alike = [pair for pair in pairs if pair[0].is_begun_like(pairs[0][0])]
        pairs = [pair for pair in pairs if pair not in alike]
        if len(alike) == 1 or _has_failed(_fork(functools.partial(_answer_together, alike, num_parallel))):
            alone += [pair for pair in alike if not pair[1].exists()]
    _run_all([functools.partial(_answer_alone, *pair) for pair in alone], num_parallel)


def _answer_alone(request: DryRunRequest, path: Path) -> None:
    sys.path[:0] = request.module_paths
    from dstrial.engine.dryrun.measure import measure

    _answer(request, path, measure)


def _answer_together(pairs: Sequence[_Pair], num_parallel: int) -> None:
    """Import the user's code once, and run each request in a fork.

    Raises RuntimeError if the import leaves a thread or an open file: a fork has only one thread, and forks share the offset of
    an open file.
    """
    sys.path[:0] = pairs[0][0].module_paths
    from dstrial.engine.dryrun.measure import begun

    this = psutil.Process()
    num_files = this.num_fds()
    with begun(pairs[0][0]) as measure:
        if this.num_threads() > 1 or this.num_fds() != num_files:
            raise RuntimeError(
                "the import leaves a thread or an open file, so each request needs its own import"
            )
        _run_all([functools.partial(_answer, *pair, measure) for pair in pairs], num_parallel)


def _answer(request: DryRunRequest, path: Path, measure: Callable[[DryRunRequest], ModelTrace]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    limit_bytes = limit_memory() if request.is_real else None
    answer: dict[str, Any]
    try:
        answer = measure(request).to_json()
    except Exception as error:  # noqa: BLE001  # the outermost function of a process
        traceback.print_exc()
        answer = {"error": _error(error, request.is_real, limit_bytes)}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(path)


def _error(error: Exception, is_real: bool, limit_bytes: int | None) -> dict[str, Any]:
    """Return ``kind``, ``message`` and ``place`` of an error, for the answer file.

    The place is ``file:line`` of user code. ``limit_bytes`` is the memory limit of a dry run with real tensors (``is_real``).
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    unsupported = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        NotImplementedError,
    )
    place = user_place(error)
    at = "" if place is None else f" at {place}"
    text = str(error).strip() or type(error).__name__
    if limit_bytes is not None and (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
        message = (
            f"one real batch{at} needs more than the {limit_bytes / 2**30:.3g} GiB of memory that this machine has free; "
            "expected it to fit. Describe it on a machine with more memory, or change what fake tensors cannot do."
        )
    elif isinstance(error, DstrialError):  # its message says what to do
        message = f"the dry run is stopped{at}: {text}"
    else:
        message = (
            f"the dry run is stopped{at} by {type(error).__name__}: {text}; expected code that runs "
            f"{'with real' if is_real else 'without values of'} tensors. "
            f"{'Correct that line.' if is_real else 'Have one real batch measured instead, or change that line.'}"
        )
    kind = "unsupported" if isinstance(error, unsupported) else "error"
    return {"kind": kind, "message": message, "place": place}


def limit_memory(free_bytes: int | None = None) -> int | None:
    """Limit this process's memory, so that allocations fail before an OOM kill.

    The limit is 90 % of ``free_bytes``, by default the machine's free memory. Returns the limit in bytes; None if the free
    memory is unknown.
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


def _run_all(calls: Sequence[Callable[[], object]], num_parallel: int) -> None:
    """Run each call in its own fork, at most ``num_parallel`` forks at once."""
    waiting = list(calls)
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < num_parallel:
            running.add(_fork(waiting.pop(0)))
        pid, status = os.wait()
        running.discard(pid)
        if os.WIFSIGNALED(status):  # as when the machine's memory runs out
            sys.stderr.write(f"the process of a dry run was killed by signal {os.WTERMSIG(status)}\n")


def _fork(call: Callable[[], object]) -> int:
    """Run ``call`` in a fork; return its process id. The fork dies with this process."""
    sys.stdout.flush()
    own_pid = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with_parent(own_pid)
        call()
        _exit(0)
    except BaseException:  # noqa: BLE001  # a fork must not return into its parent's code
        traceback.print_exc()
        _exit(1)


def _has_failed(child: int) -> bool:
    return os.waitpid(child, 0)[1] != 0


def end_with_parent(parent_pid: int) -> None:
    """Kill this process when its parent dies, because only the parent has a deadline."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip DeepSpeed's exit handlers: they call compiled ops, which the dry run has replaced.
    os._exit(status)


def user_place(error: BaseException) -> str | None:
    """Return ``file:line`` of an error's innermost frame in user code, or None."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        is_of_library = "site-packages" in file.parts or not _LIBRARY_DIRECTORIES.isdisjoint(file.parents)
        if not is_of_library and not str(file).startswith("<"):
            found = f"{file}:{line}"
    return found


if __name__ == "__main__":
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
    main(int(sys.argv[1]), sys.argv[2:])
    _exit(0)
