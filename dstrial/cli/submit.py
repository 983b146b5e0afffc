"""Submit the experiment of ``dstrial run`` to a master, and record the submission."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.experiment_arguments import Entrypoint, ResumePoint
from dstrial.cli.streams import det_for
from dstrial.config.documents import yaml_text
from dstrial.config.experiment_config.config import ExperimentConfig
from dstrial.context_directory import Context
from dstrial.errors import DstrialError, MasterError
from dstrial.hosts.hostfile import Host, python_of
from dstrial.local.checkpoint_directory import KEEP_DEFAULTS, newest_checkpoint
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.local.run_directory import RUN_DIR_VARIABLE, TEST_VARIABLE, RunDirectory
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.master.store.views import observe
from dstrial.object_storage import external_storage
from dstrial.resume.metadata import RESUME_VARIABLE
from dstrial.storage_guard import STORAGE_MARKER

if TYPE_CHECKING:
    from determined.common.api.bindings import v1File

# Arguments of `dstrial run` that ``command_line`` does not convert to flags.
_OMITTED_ARGUMENTS = ("command", "experiment", "context_dir", "print_sbatch", "detach", "run_dir")
_HOSTS_TIMEOUT_S = 12.0  # for a new master to connect to its hosts, or to report their problems
_END_TIMEOUT_S = 60.0  # for a run's own master to delete files, and the same time again for its exit
_POLL_PERIOD_S = 0.05  # between polls for the hosts of a new master, or for the end of its jobs


@dataclasses.dataclass(frozen=True, slots=True)
class Master:
    """The running master that ``dstrial run`` uses, and a client of the master."""

    state: StateDirectory
    record: MasterRecord
    client: Client
    is_own: bool = False  # serves this run only, and ends with it


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """A validated request for a run: the options of ``dstrial run`` and the config."""

    args: argparse.Namespace
    experiment: ExperimentConfig
    entrypoint: Entrypoint
    context: Context
    num_slots: int  # of the trial, over all hosts
    max_restarts: int
    is_search: bool = False
    point: ResumePoint | None = None
    known_run: RunDirectory | None = None  # None for a new run

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint directory from which the trial resumes."""
        return None if self.point is None or self.is_search else self.point.checkpoint

    @property
    def command(self) -> list[str]:
        return ["dstrial", *command_line(self.args)]


def command_line(args: argparse.Namespace, **changes: object) -> list[str]:
    """Convert ``args`` to the words of a ``dstrial run`` command, from ``run`` on.

    ``changes`` replace values of ``args``.
    """
    words = ["run", args.experiment, *([] if args.context_dir == "." else [args.context_dir])]
    for name, given in (vars(args) | changes).items():
        flag = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list) else [given]:
            if name in _OMITTED_ARGUMENTS or value in (None, "", False):
                continue
            if value is True:
                words.append(flag)
            elif name == "sbatch_arg":  # its value begins with a dash
                words.append(f"{flag}={value}")
            else:
                words += [flag, str(value)]
    return words


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A run's last submission to a master, stored in ``submission.json``."""

    experiment_id: int
    cluster_id: str
    fingerprint: str  # hash of the config and the files of the context directory
    checkpoint_storage: dict[str, Any]  # settings of the user's config on which checkpoints to keep

    @classmethod
    def read(cls, run_directory: RunDirectory) -> Submission | None:
        """Return the run's last submission; None if there is none."""
        try:
            return cls(**(read_json(run_directory.submission_path) or {}))
        except (TypeError, DstrialError):
            return None

    def write(self, run_directory: RunDirectory) -> None:
        write_json_atomically(run_directory.submission_path, dataclasses.asdict(self))


def find_or_start_master(num_slots: int, on_hosts: daemon.MasterOptions | None = None) -> tuple[Master, bool]:
    """Return (this user's running master, whether this call has started it).

    A new master has the options ``on_hosts``; None means a master without hosts. Its slots are then at least ``num_slots`` if
    they are CPUs, or devices that ranks may share.
    """
    from dstrial.master.login import log_in, session

    state = StateDirectory.choose()
    record = state.running()
    is_new = record is None
    if record is None:
        record = daemon.start(state, on_hosts or _local_options(num_slots), may_take_another_port=True)
        if on_hosts is not None:
            await_hosts(state)
        log_in(record)
    return Master(state, record, session(record)), is_new


def _local_options(num_slots: int) -> daemon.MasterOptions:
    from dstrial.master.backends.devices import find_slots
    from dstrial.ranks.identity import may_share

    found = find_slots(None)
    can_offer_more = may_share(os.environ) or all(slot.kind == "cpu" for slot in found)
    return daemon.MasterOptions(num_slots=num_slots if can_offer_more and num_slots > len(found) else None)


def require_hosts(hosts: Sequence[Host]) -> None:
    """Raise ``MasterError`` if a running master has hosts other than ``hosts``.

    Hosts differ if their names or numbers of slots differ. No-op if no master runs.
    """
    from dstrial.master.backends.status import shown_hosts

    state = StateDirectory.choose()
    record = state.running()
    if record is None:
        return
    found = {host.name: host.num_slots for host in shown_hosts(state.path)}
    wanted = {host.name: len(host.slots) for host in hosts}
    if found != wanted:
        raise MasterError(
            f"the master at {record.address} has {_hosts_text(found) or 'no hosts'}; expected {_hosts_text(wanted)}. End it with "
            "`dstrial down`, or name another state directory by DSTRIAL_STATE_DIR."
        )


def _hosts_text(slots: Mapping[str, int]) -> str:
    return ", ".join(f"{name} slots={count}" for name, count in slots.items())


def await_hosts(state: StateDirectory) -> None:
    """Wait until a new master has reported the state of its hosts.

    Returns without an error after 12 s.
    """
    from dstrial.master.backends.status import shown_hosts

    give_up_at_s = time.monotonic() + _HOSTS_TIMEOUT_S
    while not shown_hosts(state.path) and time.monotonic() < give_up_at_s:
        time.sleep(_POLL_PERIOD_S)


@contextlib.contextmanager
def own_master(run_directory: RunDirectory, options: daemon.MasterOptions) -> Iterator[Master]:
    """Start and yield a master that serves one run; stop it after the ``with`` block.

    The master's state is in the run directory. The master also ends if this process ends.
    """
    from dstrial.master.login import session

    state = StateDirectory(run_directory.master_path)
    # Processes of an earlier attempt report to the port of their master.
    port = None if daemon.live_allocations(state) else 0
    record = daemon.start(state, dataclasses.replace(options, port=port, owner_pid=os.getpid()))
    try:
        await_hosts(state)
        yield Master(state, record, session(record), is_own=True)
        give_up_at_s = time.monotonic() + _END_TIMEOUT_S
        while state.running() and observe.num_pending_jobs(state) and time.monotonic() < give_up_at_s:
            time.sleep(_POLL_PERIOD_S)
    finally:
        daemon.request_stop(record, is_kill=False)
        daemon.wait_for_end(state, record, _END_TIMEOUT_S)


def fingerprint(config: Mapping[str, Any], files: list[v1File]) -> str:
    """Return a SHA-256 of a config and files; a resume compares it to detect changes."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in sorted(files, key=lambda file: str(file.path)):
        digest.update(f"\0{file.path}\0{file.type}\0{file.mode}\0{file.content}".encode())
    return digest.hexdigest()


def submitted_config(request: RunRequest) -> dict[str, Any]:
    """Return the experiment config with the request's entrypoint, slots and restarts."""
    config = copy.deepcopy(request.experiment.raw)
    config["entrypoint"] = _entrypoint_words(request.entrypoint)
    config["resources"] = {**(config.get("resources") or {}), "slots_per_trial": request.num_slots}
    config["max_restarts"] = request.max_restarts
    return config


def _entrypoint_words(entrypoint: Entrypoint) -> list[str]:
    launcher = ["python3", "-m", "dstrial.launch"]
    if entrypoint.trial is not None:
        return [*launcher, "--trial", entrypoint.trial]
    return list(entrypoint.words) if entrypoint.starts_ranks else [*launcher, *entrypoint.words]


def config_of_run(
    config: Mapping[str, Any], request: RunRequest, run_directory: RunDirectory
) -> dict[str, Any]:
    """Return ``config`` with the run's environment variables and checkpoint storage.

    The storage is the run directory, unless ``config`` has an external storage and the run is not a test. A single trial also
    stores metrics and logs in the run directory; trials of a search only report to the master.
    """
    variables = {
        **request.experiment.environment_variables,
        "DET_PYTHON_EXECUTABLE": python_of(request.args),
    }
    if not request.is_search:
        variables[RUN_DIR_VARIABLE] = str(run_directory.path)
    if request.checkpoint is not None:
        variables[RESUME_VARIABLE] = str(request.checkpoint)
    if request.args.test:
        variables[TEST_VARIABLE] = "1"
    if request.num_slots == 0:
        variables["DS_ACCELERATOR"] = "cpu"
    given = config.get("checkpoint_storage") or {}
    # A test leaves nothing behind, so it never uses the user's storage.
    storage = None if request.args.test else external_storage(config)
    return {
        **copy.deepcopy(dict(config)),
        "environment": {
            **(config.get("environment") or {}),
            "environment_variables": [f"{name}={value}" for name, value in variables.items()],
        },
        "checkpoint_storage": {
            **(storage or {"type": "shared_fs", "host_path": str(run_directory.checkpoints_path)}),
            **{key: given[key] for key in KEEP_DEFAULTS if given.get(key) is not None},
        },
    }


def submit(request: RunRequest, master: Master, run_directory: RunDirectory) -> tuple[int, dict[int, int]]:
    """Create the run's experiment, or continue its paused or active experiment.

    Returns (experiment id, last log lines). The second item maps trial id -> id of the trial's last log line before this call;
    it is empty for a new experiment.
    """
    files = request.context.v1_files()
    config = submitted_config(request)
    mark = fingerprint(config, files)
    if request.known_run is not None:
        newest = newest_checkpoint(run_directory.checkpoints_path)
        chosen = None if request.point is None else request.point.checkpoint
        is_newest = request.is_search or (None if newest is None else newest.path) == chosen
        current = _resumable_experiment(master, run_directory, mark, is_newest=is_newest)
        if current is None or current.state == "PAUSED":
            run_directory.begin_attempt(request.command)
            run_directory.write_config(request.experiment.raw)
        if current is not None:
            known = {trial.id: observe.last_log_id(master.state, trial.id) for trial in current.trials}
            if current.state == "PAUSED":
                master.client.post(f"/api/v1/experiments/{current.id}/activate")
            return current.id, known
    else:
        # The master treats a storage without a marker file as missing, so a new storage needs one.
        run_directory.checkpoints_path.mkdir(parents=True, exist_ok=True)
        (run_directory.checkpoints_path / STORAGE_MARKER).touch()
    # Written before the trial can start and read it.
    given = config.get("checkpoint_storage") or {}
    storage = {key: given[key] for key in KEEP_DEFAULTS if key in given}
    submission = Submission(0, master.record.cluster_id, mark, storage)
    submission.write(run_directory)
    body = {
        "config": yaml_text(config_of_run(config, request, run_directory)),
        "modelDefinition": [file.to_json(False) for file in files],
        "activate": True,
    }
    experiment_id = int(master.client.post("/api/v1/experiments", body)["experiment"]["id"])
    dataclasses.replace(submission, experiment_id=experiment_id).write(run_directory)
    return experiment_id, {}


def _resumable_experiment(
    master: Master, run_directory: RunDirectory, mark: str, *, is_newest: bool
) -> observe.ExperimentView | None:
    """Return the run's last experiment if it can continue; None to create a new one.

    An experiment cannot continue if its fingerprint is not ``mark``, or if the user resumes from an older checkpoint
    (``is_newest`` is false). In these cases, a paused experiment is cancelled, and an active one raises ``DstrialError``.
    """
    last = Submission.read(run_directory)
    if last is None or last.cluster_id != master.record.cluster_id:
        return None
    view = observe.experiment_view(master.state, last.experiment_id)
    if view is None or (view.is_settled and view.state != "PAUSED"):
        return None
    if last.fingerprint == mark and is_newest and (view.is_settled or view.state == "ACTIVE"):
        return view
    if view.state != "PAUSED" or not view.is_settled:
        raise DstrialError(
            f"experiment {view.id} of the run {run_directory.path} is {view.state.lower()} with other settings or still "
            "stopping; expected it paused or ended. Stop it with "
            f"`{det_for(master.record.address)} experiment pause {view.id}`, and wait for that."
        )
    master.client.post(f"/api/v1/experiments/{view.id}/cancel")
    return None
