"""The process of a dry run: reads a request, writes an answer. ``python -m dstrial.engine.dryrun REQUEST ANSWER``.

With more pairs of files it imports everything once and answers each in a fork of its own.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dstrial.engine.dryrun.values import DryRunRequest


def main(request_path: str, answer_path: str) -> int:
    """Answer one request.

    Args:
        request_path: file with the request as JSON.
        answer_path: where the answer goes: a result, or ``{"error": {kind, message, place}}``.

    Returns:
        The exit status: 0 with a result, 1 with an error.
    """
    request = DryRunRequest.from_json(json.loads(Path(request_path).read_text(encoding="utf-8")))
    sys.path[:0] = request.module_paths
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    from dstrial.engine.dryrun.measure import measure

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    unsupported = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
    answer: dict[str, Any]
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


def main_of_many(paths: Sequence[str], num_parallel: int) -> int:
    """Answer several requests, each in a fork; one that dies leaves no answer.

    Args:
        paths: request, answer, request, answer and so on.
        num_parallel: how many run at the same time.

    Returns:
        0.
    """
    from dstrial.engine.dryrun.bypass import without_compiler

    # The compiler has threads, which would not be forked; DeepSpeed imports some of its modules only when it is used.
    with without_compiler():
        for name in (
            "dstrial.engine.dryrun.measure",
            "deepspeed.runtime.zero.muon.muon_optimizer",
            "deepspeed.runtime.zero.stage3",
        ):
            importlib.import_module(name)
    waiting = [(paths[idx], paths[idx + 1]) for idx in range(0, len(paths), 2)]
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < num_parallel:
            pair = waiting.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _exit(main(*pair))
            running.add(child)
        ended, _ = os.wait()
        running.discard(ended)
    return 0


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # DeepSpeed's exit handlers call compiled ops that are not there.
    os._exit(status)


def user_place(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame of an error that is neither a library's nor ours; None without one."""
    found = None
    frame = error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        if "site-packages" not in file.parts and _OWN not in file.parents and not str(file).startswith("<"):
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


_OWN = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "--parallel":
        _exit(main_of_many(words[2:], int(words[1])))
    _exit(main(*words))
