"""Run a function or script on several CPU ranks, in processes, with a deadline.

For tests of your own distributed code, without a launcher. Ranks get torchrun's environment variables::

    def mean_rank(offset):
        ...
        return value

    results = run_function(mean_rank, 2, 10, deadline_s=60)
    assert [r.value for r in results] == [10.5, 10.5]
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.ranks.sockets import free_port

_POLL_S = 0.05  # interval between checks whether the ranks have exited
_STACK_DUMP_S = 2.0  # time for ranks to print their stacks after SIGABRT


@dataclasses.dataclass(frozen=True, slots=True)
class RankResult:
    """The exit code, output and return value of one rank.

    Attributes:
        exit_code: exit code as in ``subprocess``, negative if a signal ended the rank.
        value: the function's return value; None for a script and for a failed rank.
    """

    rank: int
    exit_code: int
    stdout: str
    stderr: str
    value: Any


class RanksFailedError(AssertionError):
    """A rank failed or the deadline passed; the message has every rank's output.

    Args:
        problem: description of the failure in one line.
        results: one per rank.
    """

    def __init__(self, problem: str, results: Sequence[RankResult]) -> None:
        self.results = tuple(results)
        parts = [
            f"--- rank {r.rank}, exit code {r.exit_code} ---\n{r.stdout}{r.stderr}".rstrip()
            for r in self.results
        ]
        super().__init__("\n".join([problem, *parts]))


def run_function(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    deadline_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Call a function on every rank and return the ranks' results.

    Args:
        function: a function defined at the top level of a file, which every rank imports.
        num_ranks: number of ranks, on this machine.
        args: picklable arguments, the same for all ranks.
        deadline_s: timeout in seconds, after which the ranks print their stacks to stderr and are killed.
        env: further environment variables, which override those of torchrun.
        check: if True, a failed rank raises an error, and other ranks are killed after 10 s. If False, check ``exit_code``.

    Returns:
        One result per rank, in the order of the ranks.

    Raises:
        RanksFailedError: the deadline passed or, if ``check`` is true, a rank failed.
        ValueError: the function is not at the top level of a file.
    """
    source = inspect.getsourcefile(function)
    if source is None or "<" in function.__qualname__:
        raise ValueError(
            f"function is {function!r}; expected one at the top level of a file. Move it out of its function."
        )
    with tempfile.TemporaryDirectory(prefix="dstrial-ranks-") as directory:
        call = Path(directory) / "call.pickle"
        call.write_bytes(pickle.dumps(args))
        command = [
            sys.executable,
            "-m",
            __name__,
            str(Path(source).resolve()),
            function.__qualname__,
            directory,
        ]
        return _run(command, num_ranks, Path(directory), deadline_s, env or {}, check)


def run_script(
    script: Path,
    num_ranks: int,
    *args: str,
    deadline_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Run a Python script on every rank; arguments and errors as for ``run_function``."""
    with tempfile.TemporaryDirectory(prefix="dstrial-ranks-") as directory:
        command = [sys.executable, str(script), *args]
        return _run(command, num_ranks, Path(directory), deadline_s, env or {}, check)


def rank_environ(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for a CPU rank on this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }


def _run(
    command: list[str],
    num_ranks: int,
    directory: Path,
    deadline_s: float,
    env: Mapping[str, str],
    check: bool,
) -> list[RankResult]:
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(num_ranks):
            stdout = stack.enter_context((directory / f"{rank}.out").open("wb"))
            stderr = stack.enter_context((directory / f"{rank}.err").open("wb"))
            variables = {**os.environ, **rank_environ(rank, num_ranks, port), **env}
            process = subprocess.Popen(
                command, env=variables, stdout=stdout, stderr=stderr, start_new_session=True
            )
            stack.callback(_end, process)
            processes.append(process)
        in_time = _wait(processes, deadline_s, is_failure_final=check)
    results = [_result(rank, process.returncode, directory) for rank, process in enumerate(processes)]
    if not in_time:
        raise RanksFailedError(f"the ranks did not end within {deadline_s:g} s", results)
    if check and any(result.exit_code != 0 for result in results):
        raise RanksFailedError("a rank failed", results)
    return results


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float, *, is_failure_final: bool) -> bool:
    """Wait until all ranks have exited; return False if the deadline passes before.

    If ``is_failure_final`` is true, the wait also ends 10 s after a rank has failed, and the result is True. Ranks that then
    still run, or at the deadline, get SIGABRT, so that they print their stacks.
    """
    give_up_at_s = time.monotonic() + deadline_s
    is_failing = False
    while any(process.poll() is None for process in processes):
        if not is_failing and is_failure_final and any(process.poll() for process in processes):
            is_failing = True
            give_up_at_s = min(give_up_at_s, time.monotonic() + 10.0)
        if time.monotonic() > give_up_at_s:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGABRT)
            time.sleep(_STACK_DUMP_S)
            return is_failing
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(rank: int, exit_code: int, directory: Path) -> RankResult:
    value_path = directory / f"{rank}.value"
    return RankResult(
        rank=rank,
        exit_code=exit_code,
        stdout=(directory / f"{rank}.out").read_text(errors="replace"),
        stderr=(directory / f"{rank}.err").read_text(errors="replace"),
        value=pickle.loads(value_path.read_bytes()) if value_path.exists() else None,  # noqa: S301  # our own
    )


def _call_in_rank(source: Path, qualname: str, directory: Path) -> None:
    sys.path.insert(0, str(source.parent))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no Python file; expected one. Pass a function from a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    function: Any = module
    for name in qualname.split("."):
        function = getattr(function, name)
    args = pickle.loads((directory / "call.pickle").read_bytes())  # noqa: S301  # our own
    value_path = directory / f"{os.environ['RANK']}.value"
    value_path.write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _call_in_rank(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
