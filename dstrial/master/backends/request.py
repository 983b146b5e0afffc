"""The request to a back end to start an allocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.master.backends.devices import Slot

TRIAL = "TRIAL"
"""``task_type`` of a trial."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationRequest:
    """Everything that a back end needs to start a trial or command on one node.

    Fields that only trials have are 0, empty or None for a command.
    """

    allocation_id: str  # ``{task_id}.{run_id}``
    task_id: str
    trial_id: int
    experiment_id: int
    run_id: int  # number of the trial's run, from 1; each allocation is a run
    directory: Path  # for the allocation's files, absolute; created with mode 0700
    slots: tuple[Slot, ...]
    ports: dict[str, int]  # environment variable -> free port
    config: dict[str, Any]  # the experiment config with defaults
    hparams: dict[str, Any]
    trial_seed: int
    steps_completed: int  # batches at ``latest_checkpoint``; 0 without a checkpoint or for a warm start
    latest_checkpoint: str | None
    session_token: str  # gives access to this trial only; valid until the allocation ends
    user_token: str  # the submitting user's; valid until the allocation ends
    username: str
    master_url: str  # address of the master for the trial's reports
    cluster_id: str
    master_id: str
    agent_id: str
    resources_id: str  # a UUID; also the container id
    model_definition: bytes  # gzip tar of the context directory; empty for none
    entrypoint: str | list[str]
    interpreter: str | None = None  # Python of the trial, absolute; None for the master's
    startup_hook: str = ""  # shell lines from the master's settings, run before the entrypoint
    task_type: str = TRIAL  # ``TRIAL``, ``COMMAND``, ``TENSORBOARD`` or ``GENERIC``
    working_directory: str | None = None  # absolute; None for the directory with the model definition
    log_bytes: int | None = None  # size limit of output that the master has not read; None: unlimited
    storage: str | None = None  # path of the checkpoint storage; None if it has no marker
    # name in ``events/`` of the directory -> target directory
    links: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    addresses: tuple[str, ...] = ("127.0.0.1",)  # all nodes of the allocation, in rank order
    node_rank: int = 0
    slot_counts: tuple[int, ...] = ()  # number of slots on each node; empty if there is only one node
    # environment variables; those of any other source override them
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the model definition; inverse of :meth:`from_json`."""
        links = {name: str(path) for name, path in self.links.items()}
        plain = {**dataclasses.asdict(self), "directory": str(self.directory), "links": links}
        del plain["model_definition"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], model_definition: bytes) -> AllocationRequest:
        fields = dict(plain)
        fields["directory"] = Path(fields["directory"])
        fields["slots"] = tuple(Slot(**slot) for slot in fields["slots"])
        fields["links"] = {name: Path(path) for name, path in fields["links"].items()}
        fields["addresses"] = tuple(fields["addresses"])
        fields["slot_counts"] = tuple(fields["slot_counts"])
        return cls(**fields, model_definition=model_definition)

    @property
    def venvs_path(self) -> Path:
        """Directory of virtual environments, shared by all allocations on the node."""
        return self.directory.parent.with_name("venvs")

    @property
    def task_name(self) -> str:
        return (
            f"trial {self.trial_id}"
            if self.task_type == TRIAL
            else f"{self.task_type.lower()} {self.task_id}"
        )
