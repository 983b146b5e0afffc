"""One dry run in a process of its own: a fork of a server that has imported everything and computed nothing."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from dstrial.engine.dryrun.measure import measure
from dstrial.engine.dryrun.patches import without_compiler
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult

with without_compiler():
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

DEADLINE_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Have the process whose forks ``measured`` uses, so that a test neither starts it nor leaves it behind."""
    _CONTEXT.set_forkserver_preload([__name__])
    # Python 3.11's server does not take this process's search path, and leaves what it cannot import without a word.
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        forkserver.ensure_running()
    try:
        yield
    finally:
        forkserver._forkserver._stop()


def measured(asked: DryRunRequest) -> DryRunResult:
    """Measure it, without the seconds that an interpreter of its own would take to import torch and DeepSpeed.

    The child is not a fork of the tests' process: that one may have computed, and the threads which it computed with would
    be missing in its fork, whose first large addition then waits for them for ever.
    """
    reader, writer = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_answer, args=(writer, asked))
    child.start()
    writer.close()
    try:
        assert reader.poll(DEADLINE_S), f"no answer in {DEADLINE_S:.0f} s"
        answer = reader.recv()
    finally:
        child.kill()
        child.join()
    assert isinstance(answer, dict), answer
    return DryRunResult.from_json(answer)


def _answer(writer: Connection, asked: DryRunRequest) -> None:
    sys.path[:0] = asked.module_paths
    try:
        writer.send(measure(asked).to_json())
    except Exception as error:
        writer.send(repr(error))
        raise
