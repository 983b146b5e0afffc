"""Execute a dry run's request: ``python -m dstrial.engine.dryrun REQUEST ANSWER``."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from dstrial.engine.dryrun.values import DryRunRequest
from dstrial.engine.host_memory import available_bytes
from dstrial.errors import DstrialError
from dstrial.file_writes import replace_file

_SHARE_OF_FREE = 0.9  # fraction of the free memory that a dry run with real tensors may allocate
_LIBRARY_DIRECTORIES = frozenset(
    {
        Path(__file__).resolve().parents[2],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    }
)


def main(request_path: str, answer_path: str) -> None:
    """Execute a ``DryRunRequest`` from a JSON file, and write the result to a file.

    The result is a ``ModelTrace`` in JSON, or ``{"error": message}``. If the process is killed, there is no result file.
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
    replace_file(Path(answer_path), json.dumps(answer), sync=False)


def _error(error: Exception, is_real: bool, limit_bytes: int | None) -> str:
    place = user_place(error)
    at = "" if place is None else f" at {place}"
    text = str(error).strip() or type(error).__name__
    if limit_bytes is not None and (isinstance(error, MemoryError) or "can't allocate memory" in text):
        return (
            f"one real batch{at} needs more than the {limit_bytes / 2**30:.3g} GiB of memory that this machine has free; "
            "expected it to fit. Describe it on a machine with more memory, or change what fake tensors cannot do."
        )
    if isinstance(error, DstrialError):  # its message says what to do
        return f"the dry run is stopped{at}: {text}"
    return (
        f"the dry run is stopped{at} by {type(error).__name__}: {text}; expected code that runs "
        f"{'with real' if is_real else 'without values of'} tensors. "
        f"{'Correct that line.' if is_real else 'Have one real batch measured instead, or change that line.'}"
    )


def limit_memory(free_bytes: int | None = None) -> int | None:
    """Limit this process's memory to 90 % of ``free_bytes``; return the limit.

    Allocations above the limit raise an error, before the kernel would kill the process. ``free_bytes`` None stands for the
    bytes that the machine and this process's cgroups have available. If they are unknown, no limit is set, and the result is
    None.
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


def user_place(error: BaseException) -> str | None:
    """Return ``file:line`` of an error's innermost frame in user code.

    None if no frame is outside of the libraries and dstrial.
    """
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        is_of_library = "site-packages" in file.parts or not _LIBRARY_DIRECTORIES.isdisjoint(file.parents)
        if not is_of_library and not str(file).startswith("<"):
            found = f"{file}:{line}"
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip DeepSpeed's exit handlers: they call compiled ops, which the dry run has replaced.
    os._exit(0)
