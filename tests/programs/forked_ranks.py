"""Start ranks as forks of one process that has already imported DeepSpeed.

Importing torch and DeepSpeed costs seconds per process; a fork costs milliseconds. Run as a program
(``python forked_ranks.py MODULE ARGUMENT SCRATCH FOLDERS...``), it imports MODULE and writes each result that MODULE's
``main(fork_ranks, argument)`` yields into SCRATCH; every ``fork_ranks`` call starts new processes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

LIMIT_S = 200.0

IMPORTED_AHEAD = (
    "torch._dynamo",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that DeepSpeed imports lazily, which takes seconds in every rank."""


class RunningProgram:
    """A program in a separate process whose ``main`` yields ``(name, result)`` pairs.

    ``folders`` are added to the import path of the program. Use as a context manager: on exit it kills the process and
    all its ranks.
    """

    def __init__(
        self, module: str, argument: dict[str, Any], scratch: pathlib.Path, *folders: pathlib.Path
    ) -> None:
        import warm_start  # not importable in the program itself

        self._scratch = scratch
        self._log = (scratch / "program.log").open("w")
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = warm_start.Popen(
            [sys.executable, __file__, module, json.dumps(argument), str(scratch), *map(str, folders)],
            env=env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def result(self, name: str, limit_s: float = 280.0) -> Any:
        """Wait until the program has yielded this name, and return its result."""
        written = self._scratch / f"{name}.json"
        deadline = time.monotonic() + limit_s
        while not written.exists():
            ended = self._process.poll() is not None
            if (ended and not written.exists()) or time.monotonic() > deadline:
                self._log.flush()
                log = (self._scratch / "program.log").read_text()
                raise AssertionError(f"no result {name!r}; exit status {self._process.poll()}\n{log[-6000:]}")
            time.sleep(0.05)
        return json.loads(written.read_text())


def of_all_ranks(results: list[Any]) -> list[Any]:
    """Return ``results`` unchanged; fail if a rank raised an error."""
    for rank, result in enumerate(results):
        assert not (isinstance(result, dict) and "error" in result), f"rank {rank}: {result}"
    return results


def fork_ranks(num_ranks: int, body: Callable[[int], Any], scratch: pathlib.Path) -> list[Any]:
    """Call ``body(rank)`` in ``num_ranks`` new processes joined by gloo.

    Returns:
        The JSON value that ``body`` returned on each rank, in rank order. For a rank that raised, it is
        ``{"error": <type name>, "message": <text>, "traceback": <text>}``. When a rank fails, the others are
        killed after a grace period of 5 s.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    rendezvous = scratch / "rendezvous"
    pids: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, body, rendezvous, scratch)
        pids[pid] = rank
    deadline = time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        rank = pids.pop(pid, None)
        if rank is not None and status != 0:
            deadline = min(deadline, time.monotonic() + 5.0)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    results: list[Any] = []
    for rank in range(num_ranks):
        written = scratch / f"result{rank}.json"
        results.append(
            json.loads(written.read_text()) if written.exists() else {"error": "ended", "message": ""}
        )
    return results


def _be_rank(
    rank: int, num_ranks: int, body: Callable[[int], Any], rendezvous: pathlib.Path, scratch: pathlib.Path
) -> None:
    status = 1
    with (scratch / f"log{rank}.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks)
        )
        import deepspeed
        import torch

        from dstrial.ranks.process_group import without_compiled_collectives

        torch.set_num_threads(1)
        with without_compiled_collectives(is_cpu=True):
            deepspeed.init_distributed(
                dist_backend="gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=num_ranks,
                auto_mpi_discovery=False,
            )
        result = body(rank)
        status = 0
    except BaseException as error:  # noqa: BLE001 (the test gets every error)
        result = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    _write(scratch / f"result{rank}.json", result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write(path: pathlib.Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


if __name__ == "__main__":
    sys.path[1:1] = sys.argv[4:]
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"dstrial(\.|$)")  # the filter of pyproject.toml
    for ahead in IMPORTED_AHEAD:
        importlib.import_module(ahead)
    program = importlib.import_module(sys.argv[1])
    for name, result in program.main(fork_ranks, json.loads(sys.argv[2])):
        _write(pathlib.Path(sys.argv[3]) / f"{name}.json", result)
