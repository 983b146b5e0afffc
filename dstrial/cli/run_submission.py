"""What ``dstrial run`` gives to which master, and what it remembers of that."""

from __future__ import annotations

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

from dstrial.cli.run_entrypoint import Entrypoint
from dstrial.cli.streams import det_for
from dstrial.config import ExperimentConfig
from dstrial.config.documents import yaml_text
from dstrial.errors import DstrialError, MasterError
from dstrial.hosts.hostfile import Host
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.local.run_directory import RUN_DIR_VARIABLE, TEST_VARIABLE, RunDirectory
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.master.store.views import observe
from dstrial.process_state import is_stopped
from dstrial.resume.metadata import RESUME_VARIABLE

if TYPE_CHECKING:
    from determined.common.api.bindings import v1File

# tqdm 4.66 takes its defaults from TQDM_…; the libraries of Hugging Face set them themselves, and have variables of their own.
_NO_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_RETENTION_KEYS = ("save_trial_latest", "save_trial_best", "save_experiment_best")
_HOSTS_S = 12.0  # until a new master has connected to its hosts, or knows why it cannot
_END_S = 60.0  # until a run's own master has deleted what it has to, and as long until it has ended
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Master:
    """The master that trains for this command."""

    state: StateDirectory
    record: MasterRecord
    client: Client
    is_own: bool = False  # of this run alone, and ends with it


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """The content of a run directory's ``submission.json``."""

    experiment_id: int
    cluster_id: str
    fingerprint: str  # of the config and the files
    checkpoint_storage: dict[str, Any]  # of the user's config, for its retention

    @classmethod
    def read(cls, run_directory: RunDirectory) -> Submission | None:
        """Return what was submitted last; None without a submission of ours."""
        try:
            return cls(**(read_json(run_directory.submission_path) or {}))
        except (TypeError, DstrialError):
            return None

    def write(self, run_directory: RunDirectory) -> None:
        write_json_atomically(run_directory.submission_path, dataclasses.asdict(self))


def find_or_start_master(num_slots: int, on_hosts: daemon.MasterOptions | None = None) -> tuple[Master, bool]:
    """Return the user's master and whether it was started now.

    A master on the CPU is started with at least ``num_slots``; one with hosts as ``on_hosts`` says.
    """
    from dstrial.master.login import log_in, session

    state = StateDirectory.choose()
    record = state.running()
    if record is not None and is_stopped(record.pid):
        raise MasterError(
            f"the master's process {record.pid} is stopped (SIGSTOP); expected one that answers. Let it go on with "
            f"`kill -CONT {record.pid}`, or end it with `dstrial down`."
        )
    is_new = record is None
    if record is None and on_hosts is not None:
        record = daemon.start(state, on_hosts, may_take_another_port=True)
        await_hosts(state)
        log_in(record, lambda _address: False)
    elif record is None:
        from dstrial.master.backends.devices import find_slots
        from dstrial.ranks.devices import may_share

        found = find_slots(None)
        is_cpu = all(slot.kind == "cpu" for slot in found)
        can_offer_more = is_cpu or may_share(os.environ)
        options = daemon.MasterOptions(
            num_slots=num_slots if can_offer_more and num_slots > len(found) else None
        )
        record = daemon.start(state, options, may_take_another_port=True)
        log_in(record, lambda _address: False)
    return Master(state, record, session(record)), is_new


def require_hosts(hosts: Sequence[Host]) -> None:
    """Refuse a running master that has other hosts than these."""
    from dstrial.master.backends.status import shown_hosts

    state = StateDirectory.choose()
    record = state.running()
    if record is None:
        return
    found = {host.name: host.num_slots for host in shown_hosts(state.path)}
    wanted = {host.name: len(host.slots) for host in hosts}
    if found != wanted:
        raise MasterError(
            f"the master at {record.address} has {_described(found) or 'no hosts'}; expected {_described(wanted)}. End it with "
            "`dstrial down`, or name another state directory by DSTRIAL_STATE_DIR."
        )


def _described(slots: Mapping[str, int]) -> str:
    return ", ".join(f"{name} slots={count}" for name, count in slots.items())


def await_hosts(state: StateDirectory) -> None:
    """Wait until a new master has connected to its hosts, or knows why it cannot."""
    from dstrial.master.backends.status import shown_hosts

    give_up_at_s = time.monotonic() + _HOSTS_S
    while not shown_hosts(state.path) and time.monotonic() < give_up_at_s:
        time.sleep(_POLL_S)


@contextlib.contextmanager
def own_master(run_directory: RunDirectory, options: daemon.MasterOptions) -> Iterator[Master]:
    """Run a master in a run directory; it ends with the block, or with this process."""
    from dstrial.master.login import session

    state = StateDirectory(run_directory.master_path)
    # What an earlier attempt has left reports to the port of its master.
    port = None if daemon.living_allocations(state) else 0
    record = daemon.start(state, dataclasses.replace(options, port=port, owner_pid=os.getpid()))
    try:
        await_hosts(state)
        yield Master(state, record, session(record), is_own=True)
        give_up_at_s = time.monotonic() + _END_S
        while state.running() and observe.num_pending_jobs(state) and time.monotonic() < give_up_at_s:
            time.sleep(_POLL_S)
    finally:
        daemon.request_stop(record, is_kill=False)
        daemon.wait_for_end(state, record, _END_S)


def fingerprint(config: Mapping[str, Any], files: list[v1File]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in sorted(files, key=lambda file: str(file.path)):
        digest.update(f"\0{file.path}\0{file.type}\0{file.mode}\0{file.content}".encode())
    return digest.hexdigest()


def submitted_config(
    experiment: ExperimentConfig, entrypoint: Entrypoint, *, num_slots: int, max_restarts: int
) -> dict[str, Any]:
    """Return the config as the master gets it, without what belongs to one run."""
    config = copy.deepcopy(experiment.raw)
    config["entrypoint"] = _words(entrypoint)
    config["resources"] = {**(config.get("resources") or {}), "slots_per_trial": num_slots}
    config["max_restarts"] = max_restarts
    return config


def _words(entrypoint: Entrypoint) -> list[str]:
    launcher = ["python3", "-m", "dstrial.launch"]
    if entrypoint.trial is not None:
        return [*launcher, "--trial", entrypoint.trial]
    if entrypoint.starts_ranks:
        return list(entrypoint.words)
    return [*launcher, *entrypoint.words]


def config_of_run(
    config: Mapping[str, Any],
    experiment: ExperimentConfig,
    run_directory: RunDirectory,
    *,
    checkpoint: Path | None,
    is_test: bool,
    is_search: bool,
    python: str,
    shows_progress: bool = True,
) -> dict[str, Any]:
    """Return a config whose trial keeps its files in a run directory.

    ``checkpoint`` is the directory to resume; ``is_search`` leaves reports to the master; ``python`` runs the entrypoint.
    """
    result = copy.deepcopy(dict(config))
    quiet = {} if shows_progress else _NO_BARS
    variables = {**quiet, **experiment.environment_variables, "DET_PYTHON_EXECUTABLE": python}
    if not is_search:
        variables[RUN_DIR_VARIABLE] = str(run_directory.path)
    if checkpoint is not None:
        variables[RESUME_VARIABLE] = str(checkpoint)
    if is_test:
        variables[TEST_VARIABLE] = "1"
    if result["resources"]["slots_per_trial"] == 0:
        variables["DS_ACCELERATOR"] = "cpu"
    environment = dict(result.get("environment") or {})
    environment["environment_variables"] = [f"{name}={value}" for name, value in variables.items()]
    result["environment"] = environment
    asked = result.get("checkpoint_storage") or {}
    given = {key: asked[key] for key in _RETENTION_KEYS if asked.get(key) is not None}
    result["checkpoint_storage"] = {
        "type": "shared_fs",
        "host_path": str(run_directory.checkpoints_path),
        **given,
    }
    return result


def submit(master: Master, config: Mapping[str, Any], files: list[v1File]) -> int:
    """Create and activate an experiment; return its number."""
    body = {
        "config": yaml_text(dict(config)),
        "modelDefinition": [file.to_json(False) for file in files],
        "activate": True,
    }
    return int(master.client.post("/api/v1/experiments", body)["experiment"]["id"])


def running_experiment(
    master: Master, run_directory: RunDirectory, now: str, *, is_newest: bool
) -> observe.ExperimentView | None:
    """Return the run's experiment if it can go on: paused, or active since an ``up``.

    A paused one with another fingerprint than ``now``, or from another checkpoint than the newest, is cancelled: another takes
    its place. An active one of that kind raises ``DstrialError``.
    """
    last = Submission.read(run_directory)
    if last is None or last.cluster_id != master.record.cluster_id:
        return None
    view = observe.experiment_view(master.state, last.experiment_id)
    if view is None or (view.is_settled and view.state != "PAUSED"):
        return None
    if last.fingerprint == now and is_newest and (view.is_settled or view.state == "ACTIVE"):
        return view
    if view.state != "PAUSED" or not view.is_settled:
        raise DstrialError(
            f"experiment {view.id} of the run {run_directory.path} is {view.state.lower()} with other settings or still "
            "stopping; expected it paused or ended. Stop it with "
            f"`{det_for(master.record.address)} experiment pause {view.id}`, and wait for that."
        )
    master.client.post(f"/api/v1/experiments/{view.id}/cancel")
    return None
