"""Build the requests that start commands; end idle TensorBoards."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.config.experiment_config.command import interpreter_of, seconds_of
from dstrial.master.backends.backend import AllocationRequest
from dstrial.master.lifecycle import commands as life
from dstrial.master.store import commands
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection

if TYPE_CHECKING:
    from dstrial.master.services import Services

_CONNECT_TIMEOUT_S = 0.2  # timeout of a probe whether a TensorBoard listens


def request(
    services: Services, connection: Connection, allocation: Allocation, common: Mapping[str, Any]
) -> AllocationRequest:
    """Return the request to start a command.

    ``common`` has the fields of ``AllocationRequest`` whose values are found in the same way for trials and commands.
    """
    row = commands.require(connection, allocation.task_id)
    config: dict[str, Any] = json.loads(row.config)
    links: dict[str, Path] = {}
    if row.kind == "TENSORBOARD":
        links = life.tensorboard_sources(
            connection, services.cluster_id, json.loads(row.experiment_ids), json.loads(row.trial_ids)
        )
        events = Path(allocation.directory) / "events"
        words = _tensorboard(row.task_id, events, allocation.ports, config["tensorboard_args"])
    else:
        words = _words(config["entrypoint"])
    return AllocationRequest(
        **common,
        trial_id=0,
        experiment_id=0,
        config=config,
        hparams={},
        trial_seed=0,
        steps_completed=0,
        latest_checkpoint=None,
        username=row.username,
        model_definition=commands.context(connection, row.task_id) or b"",
        entrypoint=words,
        interpreter=interpreter_of(config),
        task_type=row.kind,
        working_directory=config["work_dir"],
        links=links,
    )


def _words(entrypoint: str | list[str]) -> list[str]:
    if isinstance(entrypoint, str):
        return ["sh", "-c", entrypoint]
    return ["sh", "-c", entrypoint[0]] if len(entrypoint) == 1 else entrypoint


def _tensorboard(task_id: str, directory: Path, ports: dict[str, int], more: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tensorboard.main",
        f"--logdir={directory}",
        "--host=127.0.0.1",
        f"--port={ports['TENSORBOARD_PORT']}",
        f"--path_prefix=/proxy/{task_id}",
        *more,
    ]


def watch(services: Services, allocation: Allocation) -> None:
    """Mark a TensorBoard as ready when it listens; kill it after its idle timeout.

    No-op for allocations of other commands and of trials.
    """
    port = allocation.ports.get("TENSORBOARD_PORT")
    if port is None or allocation.kill_us is not None:
        return
    if not allocation.is_ready:
        if _is_listening(port):
            services.database.write(lambda tx: life.mark_ready(tx, allocation.id))
        return
    with services.database.read() as connection:
        idle_timeout = json.loads(commands.require(connection, allocation.task_id).config)["idle_timeout"]
    limit_s = services.settings.tensorboard_timeout if idle_timeout is None else seconds_of(idle_timeout)
    if limit_s and services.activity.idle_s(allocation.task_id) >= limit_s:
        why = f"it was not used for {limit_s:g} s (idle_timeout)"
        services.database.write(lambda tx: life.kill(tx, allocation.task_id, why))


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _CONNECT_TIMEOUT_S):
        return True
    return False
