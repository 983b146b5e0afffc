"""Set up a training process: process group, core context and stop signals.

A master, if environment variables name one, stores metrics and checkpoints. Otherwise, a run directory stores them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import determined as det
import torch
from determined import core

from dstrial.errors import LaunchError, RankIdentityError
from dstrial.local import core_context as local_context
from dstrial.local.core_context import mirror, remove_tensorboard_directories
from dstrial.local.node_checkpoints import NodeCheckpointContext, ObjectStorageManager, require_storage
from dstrial.local.run_directory import (
    RUN_DIR_VARIABLE,
    RUNS_DIR_VARIABLE,
    RunDirectory,
    RunState,
    default_runs_dir,
)
from dstrial.local.script_variables import STAND_IN_CLUSTER, measuring_hyperparameters
from dstrial.local.train_context import LocalTrainContext
from dstrial.object_storage import external_storage, is_object_storage
from dstrial.ranks import process_group
from dstrial.ranks.control_channel import ControlChannel, timeout_from_environ
from dstrial.ranks.identity import RankIdentity, identify
from dstrial.ranks.stop_signals import StopSignals

logger = logging.getLogger("dstrial.trainer")

# Timeout of the wait for a directory that rank 0 has created: network file systems cache attributes for seconds.
_SHARED_S = 10.0
_LONGEST_LINE = 150  # maximum characters of Determined's log line of a report, without timestamp and rank

RUNTIME_ATTRIBUTE = "dstrial_surroundings"
"""Name of the attribute in which a core context of this module stores its ``ProcessRuntime``."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRuntime:
    """Core context, ranks, device and configuration of a training process.

    Attributes:
        core_context: Determined's core context; without a master, one that uses a run directory. Already entered.
        distributed: the distributed context of ``core_context``.
        device: this rank's device.
        signals: records SIGTERM and Ctrl-C as stop requests.
        info: Determined's ``ClusterInfo``; None without a master.
        exp_conf: the experiment config; None if not given.
        own_run: on rank 0, the run directory whose ``run.json`` this script updates; None on other ranks, or if a launcher
            updates ``run.json``.
        is_own_run: whether this script, not a launcher, updates ``run.json``; equal on all ranks.
    """

    core_context: core.Context
    distributed: core.DistributedContext
    device: torch.device
    signals: StopSignals
    info: Any
    exp_conf: dict[str, Any] | None
    own_run: RunDirectory | None
    is_own_run: bool

    @property
    def is_mirrored(self) -> bool:
        """Whether reports go to both a master and a run directory (``dstrial run``)."""
        return self.info is not None and isinstance(self.core_context.train, LocalTrainContext)


def cluster_info() -> Any:
    """Return Determined's ``ClusterInfo`` in a trial under a master; None elsewhere.

    Also None on a rank whose speed dsat (the autotuner) measures, even if the autotuner itself runs in a trial.
    """
    info = None if measuring_hyperparameters() is not None else det.get_cluster_info()
    if info is None or info.task_type != "TRIAL" or info.cluster_id == STAND_IN_CLUSTER:
        return None
    return info


@contextlib.contextmanager
def core_context(
    *,
    exp_conf: dict[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    distributed: core.DistributedContext | None = None,
) -> Iterator[core.Context]:
    """Yield a Determined core context, also without a master.

    Sets up the process group from environment variables. Without a master, metrics, checkpoints and progress go to a run
    directory, and ``preempt`` reports SIGTERM and Ctrl-C as stop requests. The mode of ``preempt`` is always ``ChiefOnly``.

    Args:
        exp_conf: the experiment config; used only without a master.
        run_dir: the run directory to create, or that of an earlier run to continue; used only without a master. The default
            is a new directory under ``./runs``.
        distributed: your own distributed context; you must then set up the process group.

    Raises:
        RankIdentityError: environment variables contradict each other about this process's rank, or a trial with several
            slots was started without a launcher.

    Ranks: all, collectively.
    """
    with process_runtime(exp_conf=exp_conf, run_dir=run_dir, distributed=distributed) as found:
        yield found.core_context


def _shortened(record: logging.LogRecord) -> bool:
    """Shorten Determined's log line of a report; return True, which keeps the line."""
    message = record.getMessage()
    if len(message) > _LONGEST_LINE and message.startswith("report_"):
        record.msg, record.args = f"{message[:_LONGEST_LINE]} …", ()
    return True


@contextlib.contextmanager
def process_runtime(
    *,
    exp_conf: dict[str, Any] | None,
    run_dir: str | os.PathLike[str] | None,
    distributed: core.DistributedContext | None,
    defers_signals: bool = False,
) -> Iterator[ProcessRuntime]:
    """Yield the core context, ranks, device and config of this training process.

    The arguments and the set-up are those of :func:`core_context`. If ``defers_signals`` is true, stop signals end the process
    until the caller calls ``signals.listen()``. Ranks: all, collectively.
    """
    if os.environ.get(RUN_DIR_VARIABLE):
        # The launcher or ``dstrial run`` prints each report of the run directory; Determined logs each one, too.
        logging.getLogger("determined.core").setLevel(logging.WARNING)
    logging.getLogger("determined.core").addFilter(_shortened)
    info = cluster_info()
    identity = identify(os.environ)
    if info is not None and distributed is None:
        _require_launcher(identity, num_slots=sum(info.container_slot_counts))
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, _error, _traceback: _end_process_group(kind, identity.world_size))
        process_group.init_process_group(identity, timeout_s=timeout_from_environ())
        device = process_group.device(identity)
        channel = distributed if distributed is not None else ControlChannel(identity)
        signals = stack.enter_context(StopSignals(is_deferred=defers_signals))
        own_run: RunDirectory | None = None
        is_own = False
        if info is not None:
            exp_conf = info.trial._config
            made = _context_of_master(info, channel, stack)
        else:
            directory, is_own = _run_directory(run_dir, exp_conf, channel)
            own_run = directory if is_own and channel.rank == 0 else None
            made = local_context.init(
                directory,
                exp_conf,
                distributed=channel,
                stop_requested=lambda: signals.requested,
                preempt_mode=core.PreemptMode.ChiefOnly,
            )
        if own_run is not None:
            stack.push(lambda kind, error, _traceback: _end_own_run(own_run, kind, error))
        stack.enter_context(made)
        found = ProcessRuntime(made, channel, device, signals, info, exp_conf, own_run, is_own)
        setattr(made, RUNTIME_ATTRIBUTE, found)
        yield found


def _context_of_master(
    info: Any, channel: core.DistributedContext, stack: contextlib.ExitStack
) -> core.Context:
    """Return the core context of a trial under a master, not yet entered.

    Under ``dstrial run``, the context also writes to a run directory, whose files are completed when ``stack`` is closed.
    ``info`` is Determined's cluster info. Ranks: all, collectively.
    """
    exp_conf = info.trial._config
    storage = external_storage(exp_conf)
    require_storage(channel, storage)
    made = core.init(
        distributed=channel,
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    )
    manager = None
    if storage is not None and is_object_storage(storage):
        # The master deletes the temporary directory when the trial's processes have ended.
        scratch = pathlib.Path(tempfile.gettempdir(), "dstrial-checkpoints")
        manager = ObjectStorageManager(storage, scratch, None, is_chief=channel.rank == 0)
    made.checkpoint = NodeCheckpointContext.of_cluster(made.checkpoint, manager)
    sink = _ClusterSystemMetrics(made, info, channel.cross_rank)
    made.profiler = local_context.NodeProfiler(info.agent_id, channel, sink)
    if os.environ.get(RUN_DIR_VARIABLE):
        kept = RunDirectory.open(os.environ[RUN_DIR_VARIABLE])
        mirrored = mirror(made, kept, exp_conf or {})
        stack.callback(remove_tensorboard_directories, made, kept)
        stack.callback(mirrored.flush_progress)
    return made


def _end_process_group(kind: type[BaseException] | None, world_size: int) -> bool:
    """Shut down the process group, unless this rank has failed and other ranks exist.

    ``kind`` is the class of the error with which this rank fails, or None. After an error, the shutdown could hang, because
    other ranks may wait in a collective. Always return False, so that the error propagates.
    """
    if kind is None or world_size == 1:
        process_group.shutdown()
    return False


def _require_launcher(identity: RankIdentity, *, num_slots: int) -> None:
    if identity.launcher == "none" and num_slots > 1:
        raise RankIdentityError(
            f"this trial has {num_slots} slots and runs as a single process; expected one rank per slot. "
            f"Set `entrypoint: python3 -m dstrial.launch {pathlib.Path(sys.argv[0]).name}`."
        )


def _run_directory(
    run_dir: str | os.PathLike[str] | None,
    exp_conf: Mapping[str, Any] | None,
    channel: core.DistributedContext,
) -> tuple[RunDirectory, bool]:
    """Return (run directory, whether this script updates its file ``run.json``).

    A launcher that created the run directory updates the file itself. ``run_dir`` None means the launcher's directory or,
    without a launcher, a new directory. Ranks: all, collectively.
    """
    launchers = os.environ.get(RUN_DIR_VARIABLE)
    if launchers and (run_dir is None or os.fspath(run_dir) == launchers):
        return RunDirectory.open(launchers), False
    made: str | LaunchError | None = None
    if channel.rank == 0:
        try:
            made = str(_own_run_directory(None if run_dir is None else pathlib.Path(run_dir), exp_conf).path)
        except LaunchError as error:  # broadcast below, so that every rank raises it
            made = error
    agreed = channel.broadcast(made)
    if isinstance(agreed, LaunchError):
        raise agreed
    _await_shared(agreed, channel)
    return RunDirectory.open(agreed), True


def _await_shared(path: str, channel: core.DistributedContext) -> None:
    """Wait until rank 0's run directory is visible; a no-op on a single machine.

    Raises:
        LaunchError: the directory is not visible after ``_SHARED_S`` seconds.
    """
    give_up_at_s = time.monotonic() + _SHARED_S
    while channel.cross_size > 1 and not pathlib.Path(path, "run.json").exists():
        if time.monotonic() > give_up_at_s:
            raise LaunchError(
                f"the run directory {path}, which rank 0 has made, is not on {socket.gethostname()}; expected one directory for "
                f"all {channel.cross_size} machines. Put it on a file system that all of them mount, and name it by run_dir or "
                f"{RUNS_DIR_VARIABLE}."
            )
        time.sleep(0.1)


def _own_run_directory(path: pathlib.Path | None, exp_conf: Mapping[str, Any] | None) -> RunDirectory:
    """Create a run directory, or begin a new attempt in the existing run at ``path``.

    If ``path`` is None, the new directory is below the default directory of runs.
    """
    if path is not None and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        run = RunDirectory.open(path)
        run.begin_attempt(sys.argv)
        return run
    made = RunDirectory.create(
        default_runs_dir(),
        name=str((exp_conf or {}).get("name") or _program_name()),
        context_dir=pathlib.Path.cwd(),
        command=sys.argv,
        config=exp_conf or {},
        path=path,
    )
    logger.info("this run's files are in %s", made.path)
    return made


def _program_name() -> str:
    name = pathlib.Path(sys.argv[0]).stem
    return "notebook" if name in ("", "ipykernel_launcher") else name


def _end_own_run(run: RunDirectory, kind: type[BaseException] | None, error: BaseException | None) -> bool:
    if isinstance(error, SystemExit) and isinstance(error.__context__, det.InvalidHP):
        kind, error = det.InvalidHP, error.__context__
    if run.read_record().state is RunState.RUNNING:
        state = RunState.COMPLETED if kind is None else RunState.FAILED
        run.end_attempt(state, None if error is None else f"{kind.__name__ if kind else ''}: {error}")
    return False


class _ClusterSystemMetrics:
    """Sends system metrics of a node from ``NodeProfiler`` to the master.

    Uses a separate sender thread. If Determined's shared sender thread fails to send training metrics, the next report of any
    kind raises the error. This may be a report of system metrics (0.38.1 ``core/_metrics.py``, ``_maybe_raise_exception``).
    """

    def __init__(self, core_context: core.Context, info: Any, node_idx: int) -> None:
        self._core, self._info, self._node_idx = core_context, info, node_idx
        self._sender: Any = None

    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        if self._sender is None:
            trial = self._info.trial
            self._sender = core._MetricsContext(self._core._session, trial.trial_id, trial._trial_run_id)
            self._sender.start()
        train = self._core.train
        if isinstance(train, LocalTrainContext):
            train.report_system_metrics(group, metrics, report_time, self._node_idx)
        self._sender.report(group=group, metrics=dict(metrics), report_time=report_time)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
