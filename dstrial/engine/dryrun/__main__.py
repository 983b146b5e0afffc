"""Execute a dry run's request: ``python -m dstrial.engine.dryrun REQUEST ANSWER``."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from dstrial.engine.dryrun.values import PARENT_VARIABLE, DryRunRequest
from dstrial.engine.host_memory import available_bytes
from dstrial.errors import DstrialError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARE_OF_FREE = 0.9  # fraction of the free memory that a dry run with real tensors may allocate
_LIBRARY_DIRECTORIES = frozenset(
    {
        Path(__file__).resolve().parents[2],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    }
)


def main(request_path: str, answer_path: str) -> None:
    """Execute a ``DryRunRequest`` file in JSON, and write the result to a file.

    The result is a ``ModelTrace`` in JSON, or ``{"error": {kind, message, place}}``. A process that dies writes no file.
    """
    request = DryRunRequest.from_json(json.loads(Path(request_path).read_text("utf-8")))
    importlib.import_module("dstrial.engine.dryrun.imported_ahead")
    sys.path[:0] = request.module_paths
    from dstrial.engine.dryrun.measure import measure

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    limit_bytes = limit_memory() if request.is_real else None
    answer: dict[str, Any]
    try:
        answer = measure(request).to_json()
    except Exception as error:  # noqa: BLE001  # the outermost function of a process
        traceback.print_exc()
        answer = {"error": _error(error, request.is_real, limit_bytes)}
    path = Path(answer_path)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(path)


def _error(error: Exception, is_real: bool, limit_bytes: int | None) -> dict[str, Any]:
    """Return an error as ``DryRunError``'s arguments ``kind``, ``message``, ``place``."""
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


def end_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


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
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip DeepSpeed's exit handlers: they call compiled ops, which the dry run has replaced.
    os._exit(0)
