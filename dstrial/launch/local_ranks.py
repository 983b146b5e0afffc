"""Start ranks on this machine as child processes and wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from dstrial.config.schema import DEFAULT_PREEMPTION_TIMEOUT_S
from dstrial.errors import LaunchError, RankStalledError
from dstrial.fork_server import NVML_CHECK_VARIABLE, client
from dstrial.fork_server.fork import Program
from dstrial.launch.failures import (
    ERROR_FILE_VARIABLE,
    TRACEBACK_FILE_VARIABLE,
    LaunchOutcome,
    write_record,
)
from dstrial.launch.output import LineReader, OnLine, Stream
from dstrial.launch.slots import threads_per_rank
from dstrial.launch.stalls.diagnosis import StallSettings
from dstrial.launch.stalls.watch import POLL_S, StallWatch, WatchedRanks
from dstrial.launch.start_watch import watched_start
from dstrial.launch.store_process import StoreProcess
from dstrial.launch.supervisor import RankProcess, Supervisor
from dstrial.launch.watches import polling
from dstrial.ranks.heartbeat import HEARTBEAT_VARIABLE, Beat, make_heartbeat_file, read_beat
from dstrial.ranks.identity import LOOPBACK_ADDR
from dstrial.ranks.job_secret import SECRET_VARIABLE, STORE_VARIABLE, new_secret, store_variable
from dstrial.ranks.sockets import free_port, loopback_only
from dstrial.ranks.stack_dump import STACKS_FILE_VARIABLE
from dstrial.ranks.startup_phase import FIRST_BATCH, PHASE_FILE_VARIABLE, TRAINING, read_phase
from dstrial.ranks.stop_signals import LAUNCHED_VARIABLE, LAUNCHER_PID_VARIABLE
from dstrial.scratch import compile_cache, scratch_directory

logger = logging.getLogger("dstrial.launch")

_POLL_S = 0.05  # interval of checks for signals to send and ended ranks
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """This launcher's index among a job's launchers, their rank counts and rendezvous.

    Attributes:
        ranks_by_node: number of ranks that each launcher starts, by ``node_rank``.
        node_rank: index of this launcher.
        master_addr: address of the first launcher's machine.
        master_port: port at which the first launcher serves the ranks' store.
    """

    ranks_by_node: tuple[int, ...]
    node_rank: int = 0
    master_addr: str = LOOPBACK_ADDR
    master_port: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_by_node)

    @property
    def num_ranks(self) -> int:
        return self.ranks_by_node[self.node_rank]

    @property
    def first_rank(self) -> int:
        return sum(self.ranks_by_node[: self.node_rank])


def run_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    shutdown_timeout_s: float = DEFAULT_PREEMPTION_TIMEOUT_S,
    on_line: OnLine | None = None,
    on_stop: Callable[[str], None] | None = None,
    placement: Placement | None = None,
    serves_store: bool = True,
    tracebacks_dir: Path | None = None,
    on_start: Callable[[str], None] | None = None,
    stalls: StallSettings | None = None,
) -> LaunchOutcome:
    """Start a command as ``num_ranks`` ranks on this machine and wait for all of them.

    The first SIGINT, SIGTERM or SIGHUP to this process is forwarded as SIGTERM to the ranks, but not to their children; a
    later SIGINT kills the ranks. Signals are handled only in the main thread. The terminal's Ctrl-C does not reach the ranks.
    When a rank exits, its remaining children are killed. For several ranks, ``OMP_NUM_THREADS`` is ``threads_per_rank()``
    unless set. Ranks of a job on one machine use a private rendezvous file, loopback (unless ``GLOO_SOCKET_IFNAME`` and
    ``NCCL_SOCKET_IFNAME`` are set) and a shared secret (``DSTRIAL_SECRET``).

    Args:
        command: program and arguments, not interpreted by a shell.
        num_ranks: ranks on this machine.
        env: the ranks' variables, in addition to this process's.
        log_dir: directory of ``rank_<n>/stdout.log`` and ``stderr.log``, which replace earlier files; if None, ranks
            inherit this process's output (or, with ``on_line``, write to pipes).
        shutdown_timeout_s: time from a stop request until the ranks are killed.
        on_line: called from another thread with rank, ``"stdout"`` or ``"stderr"``, and each line.
        on_stop: called with the signal's name when a stop request is forwarded.
        placement: this launcher's position in a job on several machines; None for one machine.
        serves_store: whether to serve a store at ``MASTER_ADDR``, for process groups that ranks create without dstrial.
        tracebacks_dir: directory of full tracebacks, ``rank_<n>.txt``; if None, ``rank_<n>/traceback.txt`` in ``log_dir``.
        on_start: called from another thread with log lines about a slow start or a stall; if None, they are logged.
        stalls: timeout and action for stalled ranks.

    Returns:
        The outcome; a failing rank raises no exception.

    Raises:
        LaunchError: the ranks could not be started.
        RankError: another program has taken the port of a job on several machines.
    """
    _check_command(command, num_ranks)
    env, where = env or {}, placement or Placement(ranks_by_node=(num_ranks,))
    with contextlib.ExitStack() as stack:
        work_dir = stack.enter_context(scratch_directory("dstrial-launch-"))
        ranks = _Ranks(work_dir, log_dir, tracebacks_dir, where, is_trial=not serves_store)
        supervisor = Supervisor(ranks.processes, shutdown_timeout_s=shutdown_timeout_s, on_stop=on_stop)
        port = where.master_port
        # Ranks on several machines also use the store for their rendezvous.
        has_store = serves_store or where.num_nodes > 1
        if has_store and where.node_rank == 0:
            store = stack.enter_context(contextlib.closing(StoreProcess(where.master_addr, port)))
            port = store.port
        port = port or free_port()
        variables = _torchrun_variables(where, port, has_store=has_store)
        variables |= _rank_variables(env, where, is_redirected=bool(log_dir or on_line))
        if where.num_nodes == 1:
            variables |= _private_variables(env, work_dir, port, num_ranks)
        stack.enter_context(_stop_on_signals(supervisor))
        stack.callback(ranks.end)
        readable = ranks.start(command, variables, is_read=on_line is not None)
        supervisor.watch()
        if on_line is not None:
            stack.enter_context(contextlib.closing(LineReader(readable, on_line)))
            stack.callback(ranks.end)  # the reader stops after the last writer has exited
        extensions = env.get("TORCH_EXTENSIONS_DIR")
        root = Path(extensions) if extensions else None
        # Only ranks that use dstrial report phases; for others only builds are watched.
        phase_files = ranks.phase_files if "dstrial.launch.rank_main" in command else list
        stack.enter_context(watched_start(phase_files, on_start or logger.info, root=root))
        watch_settings = stalls or StallSettings()
        stack.enter_context(_stalls_watched(ranks, supervisor, watch_settings, on_start or logger.warning))
        while not supervisor.tick():
            time.sleep(_POLL_S)
        return ranks.with_batch(supervisor.outcome())  # before the ranks' error records are deleted


@contextlib.contextmanager
def _stalls_watched(
    ranks: _Ranks, supervisor: Supervisor, settings: StallSettings, print_line: Callable[[str], None]
) -> Iterator[None]:
    """Watch the ranks' heartbeats inside the block; print stalls, end stalled ranks.

    Ranks are ended only if ``settings.action`` is ``restart``. A no-op if the ranks write no heartbeats.
    """
    watched = ranks.watched()
    if watched is None:
        yield
        return
    watch = StallWatch(watched, settings, print_line, ranks.end_stalled, supervisor.end_finished)
    with polling(watch.poll, watch.close, name="dstrial-stall-watch", every_s=POLL_S):
        yield


def _check_command(command: Sequence[str], num_ranks: int) -> None:
    if num_ranks < 1:
        raise LaunchError(
            f"the number of ranks is {num_ranks}; expected at least 1. Request one or more slots."
        )
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"the command is {command[0]!r}; expected a program that can be run. Check its path and permissions."
        )


def _torchrun_variables(placement: Placement, port: int, *, has_store: bool) -> dict[str, str]:
    """Return torchrun's variables that all ranks of a machine share.

    Source: torch 2.13 ``elastic/agent/server/local_elastic_agent.py``.
    """
    num_nodes, of_all = placement.num_nodes, sum(placement.ranks_by_node)
    return {
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "LOCAL_WORLD_SIZE": str(placement.num_ranks),
        "WORLD_SIZE": str(of_all),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(of_all),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex if num_nodes == 1 else "dstrial",
        "TORCHELASTIC_USE_AGENT_STORE": str(has_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _rank_variables(env: Mapping[str, str], placement: Placement, *, is_redirected: bool) -> dict[str, str]:
    # Without NVML_CHECK_VARIABLE, a script that queries devices before it imports DeepSpeed cannot fork device users.
    defaults = {NVML_CHECK_VARIABLE: "1", **compile_cache()}
    if is_redirected:
        # If ranks share an output, this is not set: unbuffered print() writes line and newline separately, so lines would mix.
        defaults["PYTHONUNBUFFERED"] = "1"
    if sum(placement.ranks_by_node) > 1:
        defaults["OMP_NUM_THREADS"] = str(threads_per_rank(placement.num_ranks))
    if placement.num_nodes > 1:
        defaults["DET_CHIEF_IP"] = placement.master_addr
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    # Read by Determined's DistributedContext.from_deepspeed() in addition to torchrun's variables.
    ours = {
        "LOCAL_SIZE": str(placement.num_ranks),
        "CROSS_RANK": str(placement.node_rank),
        "CROSS_SIZE": str(placement.num_nodes),
    }
    return {**ours, **unset, **env, LAUNCHED_VARIABLE: "1", LAUNCHER_PID_VARIABLE: str(os.getpid())}


def _private_variables(
    env: Mapping[str, str], work_dir: Path, master_port: int, num_ranks: int
) -> dict[str, str]:
    given = {**os.environ, **env}
    return {
        STORE_VARIABLE: store_variable(work_dir / "store", port=master_port, num_ranks=num_ranks),
        SECRET_VARIABLE: given.get(SECRET_VARIABLE) or new_secret(),
        **loopback_only(given),
    }


class _Ranks:
    """The rank processes on this machine, with their files and heartbeats."""

    def __init__(
        self,
        work_dir: Path,
        log_dir: Path | None,
        tracebacks_dir: Path | None,
        placement: Placement,
        *,
        is_trial: bool,
    ) -> None:
        self._is_trial = is_trial
        self._work_dir = work_dir
        self._log_dir = log_dir
        self._tracebacks_dir = tracebacks_dir
        self._heartbeats = work_dir / "heartbeats"
        self._beats: mmap.mmap | None = None
        self._running: list[subprocess.Popen[bytes] | client.ForkedProcess] = []
        self.processes = [
            RankProcess(
                rank,
                local_rank,
                error_file=self._file(rank, "error.json"),
                stderr_file=None if log_dir is None else log_dir / f"rank_{rank}" / "stderr.log",
                exit_problem=functools.partial(self._exit_problem, local_rank, rank),
            )
            for local_rank, rank in enumerate(
                range(placement.first_rank, placement.first_rank + placement.num_ranks)
            )
        ]
        try:
            self._beats = make_heartbeat_file(self._heartbeats, len(self.processes))
        except OSError as error:
            logger.warning("stall detection is disabled: cannot create %s: %s", self._heartbeats, error)

    def watched(self) -> WatchedRanks | None:
        """Return the heartbeats and stack files that ``StallWatch`` reads.

        None if the heartbeat file could not be created.
        """
        if self._beats is None:
            return None
        ranks = {one.local_rank: one.rank for one in self.processes}
        stacks_files = {rank: self._file(rank, "stacks") for rank in ranks.values()}
        return WatchedRanks(self._beats, ranks, stacks_files, self._tracebacks_dir or self._log_dir)

    def read_beat(self, local_rank: int) -> Beat | None:
        return None if self._beats is None else read_beat(self._beats, local_rank)

    def with_batch(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Return ``outcome`` with ``batches_trained`` of the first failure, if known."""
        failure = outcome.first_failure
        beat = None if failure is None else self.read_beat(failure.local_rank)
        if failure is None or beat is None:
            return outcome
        failure = dataclasses.replace(failure, batches_trained=beat.batch)
        return dataclasses.replace(outcome, first_failure=failure)

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], *, is_read: bool
    ) -> dict[tuple[int, Stream], int]:
        """Start all ranks; raise ``LaunchError`` if a process could not be started.

        ``is_read``: whether the caller reads the ranks' output. If so, the result is (rank, stream) -> file descriptor of the
        output; otherwise {}.
        """
        readable: dict[tuple[int, Stream], int] = {}
        for one in self.processes:
            with contextlib.ExitStack() as stack:
                outputs: dict[str, int] = {}
                for stream in _STREAMS if is_read or self._log_dir is not None else ():
                    read, outputs[stream] = self._output(one.rank, stream)
                    stack.callback(os.close, outputs[stream])
                    if is_read:
                        readable[one.rank, stream] = read
                    else:
                        os.close(read)
                # If each task of a Slurm step starts one rank, ``variables`` has that rank's numbers.
                numbers = {"LOCAL_RANK": one.local_rank, "RANK": one.rank, "ROLE_RANK": one.rank}
                environment = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
                environment |= {**variables, **self._file_variables(one)}
                try:
                    process = _popen(command, env=environment, **outputs)
                except OSError as error:
                    raise LaunchError(
                        f"rank {one.rank} could not be started: {error}; expected a process that runs "
                        f"{command[0]!r}. Check the limits of this account."
                    ) from error
            one.pid = process.pid
            self._running.append(process)
        client.end_spare()
        return readable

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def phase_files(self) -> list[Path]:
        return [self._file(one.rank, "phase.json") for one in self.processes]

    def end_stalled(self, rank: int | None, text: str) -> None:
        """Write an error record with ``text``, so that the supervisor ends all ranks.

        The record is that of the straggler ``rank``; of the first local rank if None.
        """
        named = self.processes[0].rank if rank is None else rank
        error = RankStalledError(text)
        write_record(self._file(named, "error.json"), error, text, line=text)

    def _file(self, rank: int, name: str) -> Path:
        return self._work_dir / f"rank_{rank}.{name}"

    def _output(self, rank: int, stream: Stream) -> tuple[int, int]:
        if self._log_dir is None:
            read, write = os.pipe()
            os.set_blocking(read, False)
            return read, write
        path = self._log_dir / f"rank_{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return os.open(path, os.O_RDONLY), write

    def _file_variables(self, one: RankProcess) -> dict[str, str]:
        variables = {
            ERROR_FILE_VARIABLE: str(one.error_file),
            PHASE_FILE_VARIABLE: str(self._file(one.rank, "phase.json")),
            HEARTBEAT_VARIABLE: f"{one.local_rank}:{self._heartbeats}",
            STACKS_FILE_VARIABLE: str(self._file(one.rank, "stacks")),
        }
        if self._tracebacks_dir is not None:
            variables[TRACEBACK_FILE_VARIABLE] = str(self._tracebacks_dir / f"rank_{one.rank}.txt")
        elif self._log_dir is not None:
            variables[TRACEBACK_FILE_VARIABLE] = str(self._log_dir / f"rank_{one.rank}" / "traceback.txt")
        return variables

    def _exit_problem(self, local_rank: int, rank: int) -> str:
        phase = read_phase(self._file(rank, "phase.json"))
        if phase is None or not (phase[0] in (FIRST_BATCH, TRAINING) or (self._is_trial and phase[0])):
            return ""
        beat = self.read_beat(local_rank)
        where = "before training" if beat is None else f"at batch {beat.batch}, before the end of training"
        return (
            f"It ended with exit code 0 {where}. To stop training early, call context.set_stop_requested(True) or exit with "
            "another code."
        )


def _popen(
    command: Sequence[str], *, env: dict[str, str], stdout: int = 1, stderr: int = 2
) -> subprocess.Popen[bytes] | client.ForkedProcess:
    """Start a rank's process, if possible as a fork of this process's idle fork."""
    if tuple(command[:3]) == (sys.executable, "-m", "dstrial.launch.rank_main"):
        # The fork leads a process group but no session: by its session, a master finds a trial's remaining processes.
        program = Program(command[1:], env, str(Path.cwd()), leads="group")
        process = client.fork_or_none(program, [0, stdout, stderr])
        if process is not None:
            return process
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=True)


@contextlib.contextmanager
def _stop_on_signals(supervisor: Supervisor) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(signal_number: int, _frame: FrameType | None) -> None:
        supervisor.request_stop(signal.Signals(signal_number))

    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP
        handled.append(signal.SIGHUP)
    previous = {signal_: signal.signal(signal_, on_signal) for signal_ in handled}
    try:
        yield
    finally:
        for signal_, handler in previous.items():
            signal.signal(signal_, signal.SIG_DFL if handler is None else handler)
