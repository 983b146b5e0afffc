"""Give a dry run an interpreter of its own, so that what it puts in place of torch and DeepSpeed ends with it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult
from dstrial.errors import DstrialError

_SHOWN_CHARACTERS = 4000


class DryRunError(DstrialError):
    """A configuration cannot be dry-run.

    Args:
        kind: ``unsupported`` where fake tensors cannot do what the code asks, ``error`` where the code raises,
            ``deadline`` where it took too long, ``died`` where the process ended without an answer.
        message: for a person.
        place: ``file:line`` of user code that could not be run; None if unknown.
    """

    def __init__(self, kind: str, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.place = place


def dry_run(request: DryRunRequest, *, deadline_s: float = 300.0) -> DryRunResult:
    """Run what is asked in a new process and return what it found.

    Args:
        request: what to run.
        deadline_s: seconds after which the process is ended.

    Raises:
        DryRunError: the run failed, or took too long.

    Ranks: any; no communication.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dstrial-dryrun-") as directory:
        asked, answered = Path(directory) / "request.json", Path(directory) / "answer.json"
        log = Path(directory) / "log"
        asked.write_text(json.dumps(request.to_json()), encoding="utf-8")
        command = [sys.executable, "-m", "dstrial.engine.dryrun", str(asked), str(answered)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=_environment(),
                cwd=request.module_paths[0] if request.module_paths else None,
                start_new_session=True,
            )
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise DryRunError(
                    "deadline",
                    f"the dry run takes more than {deadline_s:g} s; expected it to end by then. "
                    f"Allow it more time, or use a smaller model.\n{_tail(log)}",
                ) from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not answered.exists():
            raise DryRunError(
                "died",
                f"the dry run's process ended with exit code {process.returncode} and no answer; expected one. "
                f"Read its output:\n{_tail(log)}",
            )
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        raise DryRunError(**answer["error"])
    result = DryRunResult.from_json(answer)
    return dataclasses.replace(result, wall_s=time.monotonic() - started_s)


def _environment() -> dict[str, str]:
    """Return this environment without what says which rank of a job this process is, and without accelerators."""
    ranks = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    # The directory of this package first: the child imports the same dstrial as this process.
    own = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [own, kept.get("PYTHONPATH")]))
    return {
        **kept,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]
