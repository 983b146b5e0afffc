"""Start ranks on this machine through torchrun's elastic agent and wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import mmap
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from dstrial.config.schema import DEFAULT_PREEMPTION_TIMEOUT_S
from dstrial.errors import LaunchError, RankStalledError
from dstrial.fork_server import client
from dstrial.fork_server.key import NVML_CHECK_VARIABLE
from dstrial.launch.early_imports import is_ready
from dstrial.launch.failures import (
    ERROR_FILE_VARIABLE,
    TRACEBACK_FILE_VARIABLE,
    LaunchOutcome,
    RankFailure,
    write_record,
)
from dstrial.launch.output import LineReader, OnLine, Stream
from dstrial.launch.rendezvous import Rendezvous
from dstrial.launch.stale_locks import remove_stale_locks
from dstrial.launch.stalls.stall_board import StallBoard
from dstrial.launch.stalls.stall_rules import StallSettings
from dstrial.launch.stalls.stall_watch import LOOK_EVERY_S, StallWatch, WatchedRanks
from dstrial.launch.start_watch import watched_start
from dstrial.launch.supervisor import DEFAULT_FAILURE_GRACE_S, Supervisor
from dstrial.launch.watches import watching
from dstrial.ranks.heartbeat import HEARTBEAT_VARIABLE, Phase, make_heartbeat_file, read_beat
from dstrial.ranks.identity import LOOPBACK_ADDR
from dstrial.ranks.job_secret import SECRET_VARIABLE, STORE_VARIABLE, new_secret, store_variable
from dstrial.ranks.sockets import loopback_only
from dstrial.ranks.stack_dump import STACKS_FILE_VARIABLE
from dstrial.ranks.startup_phase import FIRST_BATCH, PHASE_FILE_VARIABLE, TRAINING, read_phase
from dstrial.ranks.stop_signals import LAUNCHED_VARIABLE, LAUNCHER_PID_VARIABLE
from dstrial.scratch import compile_cache, scratch_directory

logger = logging.getLogger("dstrial.launch")

_MONITOR_INTERVAL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where this launcher stands among those of one job."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK_ADDR
    master_port: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RunningRanks:
    """The ranks of one launch; ``watched`` is None where they have no heartbeats."""

    supervisor: Supervisor
    watched: WatchedRanks | None

    def positions(self) -> dict[int, int]:
        """Return the batches that each rank of this machine says it has trained."""
        if self.watched is None:
            return {}
        beats = {rank: read_beat(self.watched.beats, slot) for slot, rank in self.watched.ranks.items()}
        return {
            rank: beat.batch
            for rank, beat in beats.items()
            if beat is not None and beat.phase is not Phase.NONE
        }


def run_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    shutdown_timeout_s: float = DEFAULT_PREEMPTION_TIMEOUT_S,
    failure_grace_s: float = DEFAULT_FAILURE_GRACE_S,
    on_line: OnLine | None = None,
    on_stop: Callable[[str], None] | None = None,
    placement: Placement | None = None,
    serves_store: bool = True,
    tracebacks_dir: Path | None = None,
    on_start: Callable[[str], None] | None = None,
    stalls: StallSettings | None = None,
    stall_memory: Path | None = None,
    on_ready: Callable[[RunningRanks], None] | None = None,
) -> LaunchOutcome:
    """Run a command on ``num_ranks`` ranks of this machine and wait for all of them.

    The first SIGINT, SIGTERM or SIGHUP to this process reaches the ranks as SIGTERM, and only the ranks, not the processes they
    started; a SIGINT after that kills them. Signals are handled only in the main thread. Every rank leads a session of its own,
    so the terminal's Ctrl-C does not reach it, and whatever it leaves behind ends with it. ``OMP_NUM_THREADS`` is 1 for several
    ranks unless set. Ranks of one machine meet in a file of a private directory, talk over loopback unless
    ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are set, and share a secret (``DSTRIAL_SECRET``).

    Args:
        command: program and arguments, not interpreted by a shell.
        num_ranks: ranks on this machine.
        env: variables for the ranks, on top of those of this process.
        log_dir: ``rank_<n>/stdout.log`` and ``stderr.log`` are written below it, replacing earlier ones;
            None leaves the ranks this process's own output (or, with ``on_line``, pipes).
        shutdown_timeout_s: how long after a request to stop the ranks are killed.
        failure_grace_s: how long after the first failure the other ranks are killed.
        on_line: called from another thread with rank, ``"stdout"`` or ``"stderr"``, and each line.
        on_stop: called from another thread with the signal's name when the request is passed on.
        placement: for a job on several machines.
        serves_store: whether ranks may make a process group without dstrial, and so need a store at ``MASTER_ADDR``.
        tracebacks_dir: for whole tracebacks, ``rank_<n>.txt``; ``rank_<n>/traceback.txt`` below ``log_dir`` if None.
        on_start: called from another thread with lines on a long start and on stalls; None logs them.
        stalls: when ranks count as stalled, and what follows.
        stall_memory: file of the positions that ranks were ended at, over the launches of one trial.
        on_ready: called once before the first rank starts.

    Returns:
        How it ended; a failing rank is no exception here.

    Raises:
        LaunchError: the ranks could not be started.
        RankError: another program has taken the port of a job on several machines.
    """
    _check_command(command, num_ranks)
    remove_stale_locks()
    where = placement or Placement()
    supervisor = Supervisor(
        shutdown_timeout_s=shutdown_timeout_s, failure_grace_s=failure_grace_s, on_stop=on_stop
    )
    with contextlib.ExitStack() as stack:
        work_dir = stack.enter_context(scratch_directory("dstrial-launch-"))
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        is_redirected = log_dir is not None or on_line is not None
        rendezvous = Rendezvous(
            where, uuid.uuid4().hex if where.num_nodes == 1 else "dstrial", serves_store=serves_store
        )
        stack.callback(rendezvous.shutdown)
        variables = _rank_variables(env or {}, num_ranks, where, is_redirected=is_redirected)
        if where.num_nodes == 1:
            variables |= _private_variables(env or {}, work_dir, rendezvous.master_port, num_ranks)
        files = _RankFiles(
            work_dir, log_dir, on_line, variables, supervisor, tracebacks_dir, is_trial=not serves_store
        )
        stack.callback(files.close)
        stack.enter_context(_quiet_torchelastic())
        stack.enter_context(_stop_on_signals(supervisor))
        extensions = (env or {}).get("TORCH_EXTENSIONS_DIR")
        root = Path(extensions) if extensions else None
        # What is no rank of ours reports no phase: only builds are watched.
        phase_files = files.phase_files if "dstrial.launch.rank_main" in command else list
        stack.enter_context(watched_start(phase_files, on_start or logger.info, root=root))
        board = None
        if where.num_nodes > 1:
            addr, port = rendezvous.master_addr, rendezvous.master_port
            board = StallBoard(addr, port, where.node_rank, where.num_nodes)
        watched = files.watched_ranks(num_ranks, stall_memory, board)
        if watched is not None:
            watch = StallWatch(
                watched,
                stalls or StallSettings(),
                on_start or logger.warning,
                files.end_stalled,
                supervisor.end_left,
            )
            stack.enter_context(
                watching(watch.look, watch.close, name="dstrial-stall-watch", every_s=LOOK_EVERY_S)
            )
        if on_ready is not None:
            on_ready(RunningRanks(supervisor, watched))
        _run_agent(_make_agent(command, num_ranks, rendezvous, files, supervisor))
        failure = supervisor.first_failure()
        if failure is not None and watched is not None:
            beat = read_beat(watched.beats, failure.local_rank)
            failure = dataclasses.replace(failure, batches_trained=None if beat is None else beat.batch)
    return _outcome(supervisor, failure)


def _outcome(supervisor: Supervisor, failure: RankFailure | None) -> LaunchOutcome:
    exit_codes = supervisor.exit_codes()
    if supervisor.was_killed_by_user:
        exit_code = 130
    elif failure is not None:
        exit_code = failure.exit_code or 1
    else:
        exit_code = max(exit_codes, default=0)
    return LaunchOutcome(
        exit_code,
        failure,
        exit_codes,
        stopped_by=supervisor.stop_signal,
        killed_ranks=supervisor.killed_ranks(),
        ended_at_once=supervisor.was_killed_by_user,
    )


def _check_command(command: Sequence[str], num_ranks: int) -> None:
    if num_ranks < 1:
        raise LaunchError(
            f"the number of ranks is {num_ranks}; expected at least 1. Ask for one or more slots."
        )
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"the command is {command[0]!r}; expected a program that can be run. Check its path and permissions."
        )


def _rank_variables(
    env: Mapping[str, str], num_ranks: int, placement: Placement, *, is_redirected: bool
) -> dict[str, str]:
    # Without it a script that looks for a device before it imports DeepSpeed cannot fork workers that use one.
    defaults = {NVML_CHECK_VARIABLE: "1", **compile_cache()}
    if is_redirected:
        # Not where ranks share an output: a line and its end, written apart, would mix with other ranks' lines.
        defaults["PYTHONUNBUFFERED"] = "1"
    if num_ranks * placement.num_nodes > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    if placement.num_nodes > 1:
        defaults["DET_CHIEF_IP"] = placement.master_addr
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    # What Determined's DistributedContext.from_deepspeed() reads beside torchrun's variables.
    ours = {
        "LOCAL_SIZE": str(num_ranks),
        "CROSS_RANK": str(placement.node_rank),
        "CROSS_SIZE": str(placement.num_nodes),
    }
    return {**ours, **unset, **env, LAUNCHED_VARIABLE: "1", LAUNCHER_PID_VARIABLE: str(os.getpid())}


def _private_variables(
    env: Mapping[str, str], work_dir: Path, master_port: int, num_ranks: int
) -> dict[str, str]:
    """Return what a machine's ranks share: a file to meet in, a secret, loopback only."""
    given = {**os.environ, **env}
    return {
        STORE_VARIABLE: store_variable(work_dir / "store", port=master_port, num_ranks=num_ranks),
        SECRET_VARIABLE: given.get(SECRET_VARIABLE) or new_secret(),
        **loopback_only(given),
    }


def _make_agent(
    command: Sequence[str], num_ranks: int, rendezvous: Rendezvous, files: _RankFiles, supervisor: Supervisor
) -> _RankAgent:
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=command[0],
        # The agent substitutes ${local_rank} in arguments; a doubled sign is a plain one to it.
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
    )
    return _RankAgent(spec, files, supervisor)


class _RankFiles(LogsSpecs):  # type: ignore[misc]  # mypy does not follow torch.distributed.elastic
    """Gives the agent each rank's variables, and where output and errors go."""

    def __init__(
        self,
        work_dir: Path,
        log_dir: Path | None,
        on_line: OnLine | None,
        variables: Mapping[str, str],
        supervisor: Supervisor,
        tracebacks_dir: Path | None,
        *,
        is_trial: bool,
    ) -> None:
        super().__init__(log_dir=str(log_dir) if log_dir is not None else None)
        self._is_trial = is_trial
        self._work_dir = work_dir
        self._log_dir = log_dir
        self._on_line = on_line
        self._variables = variables
        self._supervisor = supervisor
        self._tracebacks_dir = tracebacks_dir
        self._reader: LineReader | None = None
        self._phase_files: dict[int, Path] = {}
        self._heartbeats = work_dir / "heartbeats"
        self._ranks: dict[int, int] = {}
        self._stacks_files: dict[int, Path] = {}
        self._beats: mmap.mmap | None = None

    def watched_ranks(
        self, num_ranks: int, memory: Path | None, board: StallBoard | None
    ) -> WatchedRanks | None:
        """Make the heartbeat file; None where it cannot be made, and nothing is watched."""
        try:
            beats = make_heartbeat_file(self._heartbeats, num_ranks)
        except OSError as error:
            logger.warning("stalls are not watched for, %s cannot be made: %s", self._heartbeats, error)
            return None
        self._beats = beats
        kept = self._tracebacks_dir or self._log_dir
        return WatchedRanks(beats, self._ranks, self._stacks_files, kept, memory, board)

    def end_stalled(self, rank: int | None, text: str) -> None:
        """Record a stall as the error of one rank, which ends all of them."""
        named = next(iter(self._ranks.values())) if rank is None else rank
        error = RankStalledError(text)
        write_record(self._work_dir / f"rank_{named}.error.json", error, text, line=text)

    def _why_left(self, local_rank: int) -> str:
        """Say why exit code 0 of a rank is a failure; empty where it is none."""
        phase = read_phase(self._phase_files[self._ranks[local_rank]])
        if phase is None or not (phase[0] in (FIRST_BATCH, TRAINING) or (self._is_trial and phase[0])):
            return ""
        beat = None if self._beats is None else read_beat(self._beats, local_rank)
        where = "before training" if beat is None else f"at batch {beat.batch}, before the end of training"
        return (
            f"It ended with exit code 0 {where}. To stop training early, call context.set_stop_requested(True) or exit with "
            "another code."
        )

    def phase_files(self) -> list[Path]:
        return list(self._phase_files.values())

    @property
    def root_log_dir(self) -> str:
        return str(self._log_dir or self._work_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = LogsDest()
        paths: dict[tuple[int, Stream], Path] = {}
        streams: tuple[tuple[Stream, dict[int, str]], ...] = (
            ("stdout", destinations.stdouts),
            ("stderr", destinations.stderrs),
        )
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            rank_dir = (self._log_dir or self._work_dir) / f"rank_{rank}"
            rank_dir.mkdir(exist_ok=True)
            for stream, by_local_rank in streams:
                path = rank_dir / f"{stream}.log"
                is_redirected = self._log_dir is not None or self._on_line is not None
                by_local_rank[local_rank] = str(path) if is_redirected else ""
                if is_redirected:
                    paths[rank, stream] = path
                    path.unlink(missing_ok=True)
                    if self._log_dir is not None:
                        path.touch()
                    else:
                        os.mkfifo(path)
            error_file = self._work_dir / f"rank_{rank}.error.json"
            destinations.error_files[local_rank] = str(error_file)
            env.update(self._variables)
            env[ERROR_FILE_VARIABLE] = str(error_file)
            env[PHASE_FILE_VARIABLE] = str(self._work_dir / f"rank_{rank}.phase.json")
            self._phase_files[rank] = self._work_dir / f"rank_{rank}.phase.json"
            env[HEARTBEAT_VARIABLE] = f"{local_rank}:{self._heartbeats}"
            env[STACKS_FILE_VARIABLE] = str(self._work_dir / f"rank_{rank}.stacks")
            self._stacks_files[rank] = self._work_dir / f"rank_{rank}.stacks"
            self._ranks[local_rank] = rank
            if self._tracebacks_dir is not None:
                env[TRACEBACK_FILE_VARIABLE] = str(self._tracebacks_dir / f"rank_{rank}.txt")
            elif self._log_dir is not None:
                env[TRACEBACK_FILE_VARIABLE] = str(rank_dir / "traceback.txt")
            self._supervisor.set_files(
                local_rank,
                error_file=error_file,
                stderr_file=rank_dir / "stderr.log" if self._log_dir is not None else None,
                why_left=functools.partial(self._why_left, local_rank),
            )
        if self._on_line is not None:
            self._reader = LineReader(paths, self._on_line)
        return destinations

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _RankAgent(LocalElasticAgent):  # type: ignore[misc]  # mypy does not follow torch.distributed.elastic
    """The elastic agent; the supervisor decides whom to signal and when it is over."""

    def __init__(self, spec: WorkerSpec, files: _RankFiles, supervisor: Supervisor) -> None:
        super().__init__(spec, logs_specs=files)
        self._supervisor = supervisor

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        with _ranks_as_forks():
            pids: dict[int, int] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            self._supervisor.watch(worker.local_rank, worker.global_rank, pids[worker.local_rank])
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._supervisor.tick():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)


@contextlib.contextmanager
def _ranks_as_forks() -> Iterator[None]:
    """Start ranks as forks of the fork server that this process has, if any.

    The agent starts a rank by ``SubprocessHandler._popen`` (torch 2.6 to 2.13, ``multiprocessing/subprocess_handler``).
    """
    connection = client.of_this_process
    if connection is None or not is_ready(connection):
        yield
        return
    usual = SubprocessHandler._popen

    def _popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[:3] != (sys.executable, "-m", "dstrial.launch.rank_main"):
            return usual(self, args, env)
        return client.ForkedPopen(
            connection,
            args,
            told=lambda reason: logger.warning("a rank starts as a new process, not as a fork: %s", reason),
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    SubprocessHandler._popen = _popen
    try:
        yield
    finally:
        SubprocessHandler._popen = usual
        client.of_this_process = None
        connection.close()


def _run_agent(agent: _RankAgent) -> None:
    """Run the agent in a thread, where it cannot install signal handlers of its own."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            agent.run()
        except Exception as error:  # noqa: BLE001  # background thread main: raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="dstrial-agent")
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.2)
    if errors:
        raise LaunchError(
            f"the ranks could not be started or watched: {errors[0]}; expected the elastic agent to run. "
            "Look at the cause below."
        ) from errors[0]


@contextlib.contextmanager
def _stop_on_signals(supervisor: Supervisor) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(signal_number: int, _frame: FrameType | None) -> None:
        supervisor.request_stop(signal.Signals(signal_number))

    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's promise is kept
        handled.append(signal.SIGHUP)
    previous = {signal_: signal.signal(signal_, on_signal) for signal_ in handled}
    try:
        yield
    finally:
        for signal_, handler in previous.items():
            signal.signal(signal_, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Keep the agent's account of failures off the screen; the launcher shows its own."""
    prefix = "torch.distributed.elastic"
    names = [
        name for name in logging.root.manager.loggerDict if name == prefix or name.startswith(f"{prefix}.")
    ]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
