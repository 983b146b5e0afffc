"""Execute dry runs in child processes; this module does not import torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dstrial import determined_imports
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace
from dstrial.errors import DstrialError
from dstrial.fork_server.client import OwnForkServer
from dstrial.fork_server.fork import Program
from dstrial.scratch import scratch_directory

_SHOWN_CHARACTERS = 4000
_IMPORT_TIMEOUT_S = 120.0
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_SERVER = OwnForkServer(["dstrial.engine.dryrun.imported_ahead"])


class DryRunError(DstrialError):
    """A dry run failed, or exceeded its deadline."""


def dry_run(request: DryRunRequest, *, deadline_s: float = 300.0) -> ModelTrace:
    """Execute a dry run in a child process; kill the process after ``deadline_s``.

    Raises:
        DryRunError: the dry run failed, or exceeded the deadline.
    """
    (found,) = dry_runs([request], deadline_s=deadline_s)
    if isinstance(found, DryRunError):
        raise found
    return found


def dry_runs(
    requests: Sequence[DryRunRequest], *, deadline_s: float = 600.0, num_parallel: int = 1
) -> list[ModelTrace | DryRunError]:
    """Execute dry runs, ``num_parallel`` at a time; return a result or error for each.

    The dry runs are forks of one server process, which later calls reuse. ``deadline_s`` limits the duration of the whole call;
    dry runs that have not ended by then are killed, and their results are errors.
    """
    until_s = time.monotonic() + deadline_s
    with ThreadPoolExecutor(num_parallel) as pool:
        return list(pool.map(lambda request: _run(request, deadline_s, until_s), requests))


def _run(request: DryRunRequest, deadline_s: float, until_s: float) -> ModelTrace | DryRunError:
    with scratch_directory("dstrial-dryrun-") as directory:
        log, asked, answered = (directory / name for name in ("log", "request.json", "answer.json"))
        asked.write_text(json.dumps(request.to_json()), encoding="utf-8")
        program = Program(
            ["-m", "dstrial.engine.dryrun", str(asked), str(answered)],
            _environment(),
            str(Path.cwd() / (request.module_paths[0] if request.module_paths else "")),
        )
        with log.open("wb") as output, open(os.devnull, "rb") as null:  # noqa: PTH123
            files = [null.fileno(), output.fileno(), output.fileno()]
            process = _SERVER.run(program, files, min(until_s - time.monotonic(), _IMPORT_TIMEOUT_S))
            is_late = False
            try:
                process.wait(max(until_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output_end = log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]
        return _answer(answered, is_late, deadline_s, process.returncode, output_end)


def _answer(
    path: Path, is_late: bool, deadline_s: float, exit_code: int | None, output_end: str
) -> ModelTrace | DryRunError:
    if path.exists():
        answer = json.loads(path.read_text(encoding="utf-8"))
        return DryRunError(answer["error"]) if "error" in answer else ModelTrace.from_json(answer)
    if is_late:
        return DryRunError(
            f"the dry run takes more than {deadline_s:g} s; expected it to end by then. "
            f"Allow it more time, or use a smaller model.\n{output_end}",
        )
    return DryRunError(
        f"the dry run's process ended with exit code {exit_code} and no answer; expected one. "
        f"Read its output:\n{output_end}",
    )


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    # This package's directory comes first, so that the child imports the same dstrial as this process.
    own = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [own, kept.get("PYTHONPATH")]))
    return {
        **kept,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **determined_imports.variables({**kept, "PYTHONPATH": path}),
    }
