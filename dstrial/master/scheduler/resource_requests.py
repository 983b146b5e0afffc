"""Build resource requests to Slurm or Ray, and apply their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrial.master.backends.backend import Answer, Key, Node, ResourceRequest
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle import endings
from dstrial.master.scheduler.queue import Waiting
from dstrial.master.store import commands
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Database, Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.visible_text import visible_line

if TYPE_CHECKING:
    from dstrial.config.diagnostics import Diagnostics
    from dstrial.master.services import Services


def requests_of(
    waiting: Iterable[Waiting],
    used_by: Mapping[int, int],
    off: frozenset[int],
    describe: Callable[[Key], tuple[str, Mapping[str, Any]]],
) -> Iterator[ResourceRequest]:
    """Yield the requests of waiting trials and commands to Slurm or Ray.

    Jobs that would exceed their experiment's ``max_slots`` are skipped; ``used_by`` maps experiment id -> number of slots in
    use. ``off`` are ids of disabled nodes; ``describe`` returns a job's title and config.
    """
    used = dict(used_by)
    for one in waiting:
        in_use = used.get(one.experiment_id, 0)
        if one.num_slots == 0 or (one.max_slots is not None and in_use + one.num_slots > one.max_slots):
            continue
        used[one.experiment_id] = in_use + one.num_slots
        yield ResourceRequest(
            key=one.key,
            num_slots=one.num_slots,
            is_on_one_node=one.is_on_one_node,
            excluded_nodes=one.excluded_nodes | off,
            describe=lambda key=one.key: describe(key),  # type: ignore[misc]
            fewer=tuple(count for count in one.choices if count < one.num_slots),
        )


def request_of_config(
    config: Mapping[str, Any], nodes: Iterable[Node], *, may_wait: bool
) -> ResourceRequest | None:
    """Return the request for one trial of a config; None if trials need no slots.

    With ``may_wait``, the request is not refused if the cluster's nodes are too few at present.
    """
    resources = config["resources"]
    num_slots = resources["slots_per_trial"]
    if num_slots == 0:
        return None
    largest = max((len(node.slots) for node in nodes), default=0)
    return ResourceRequest(
        key="",
        num_slots=num_slots,
        is_on_one_node=num_slots > largest and bool(resources.get("is_single_node")),
        excluded_nodes=frozenset(),
        describe=lambda: (str(config.get("name")), config),
        may_wait=may_wait,
    )


def request_of_command(config: Mapping[str, Any]) -> ResourceRequest | None:
    """Return the request for a submitted command; None if it needs no slots."""
    num_slots = config["resources"]["slots"]
    if num_slots == 0:
        return None
    return ResourceRequest(
        key="",
        num_slots=num_slots,
        is_on_one_node=True,
        excluded_nodes=frozenset(),
        describe=lambda: (str(config["description"]), config),
    )


def starts_of(waiting: Sequence[Waiting], answer: Answer) -> list[tuple[Key, list[int]]]:
    """Return (key, slot ids) of the waiting trials and commands that start now.

    These are the trials and commands with slots in ``answer``, and those that need no slots.
    """
    found: list[tuple[Key, list[int]]] = []
    for one in waiting:
        if one.num_slots == 0:
            found.append((one.key, []))
        elif one.key in answer.slots:
            found.append((one.key, list(answer.slots[one.key])))
    return found


def describe(connection: Connection, key: Key) -> tuple[str, Mapping[str, Any]]:
    """Return title and config of a trial or command, for its ``ResourceRequest``."""
    if isinstance(key, str):
        command = commands.require(connection, key)
        return f"task {key} ({visible_line(command.description)})", json.loads(command.config)
    trial = trial_rows.require(connection, key)
    config = json.loads(experiment_rows.require(connection, trial.experiment_id).config)
    return (
        f"trial {key} of experiment {trial.experiment_id} ({visible_line(str(config.get('name')))})",
        config,
    )


def write_answer(database: Database, answer: Answer) -> None:
    """Log the messages in an answer of Slurm or Ray; fail refused trials and commands."""
    if not answer.messages and not answer.refused:
        return

    def write(tx: Transaction) -> None:
        for key, text in answer.messages.items():
            _log_line(tx, key, text, "INFO")
        for key, text in answer.refused.items():
            _log_line(tx, key, f"it can never start: {text}", "ERROR")
            if isinstance(key, str):
                life.refuse(tx, key, text)
            elif trial_rows.require(tx.connection, key).state == "ACTIVE":
                endings.close_trial(tx, key, "ERROR", why=text)

    database.write(write)


def _log_line(tx: Transaction, key: Key, text: str, level: str) -> None:
    if isinstance(key, str):
        add_master_line(tx, key, None, text, level=level)
    else:
        add_master_line(tx, trial_rows.require(tx.connection, key).task_id, key, text, level=level)


SLOTS_KEY = "resources.slots_per_trial"  # the key under which back ends report an unsatisfiable slot count


async def refuse_unsatisfiable(
    services: Services, request: ResourceRequest | None, findings: Diagnostics, *, slots_key: str = SLOTS_KEY
) -> None:
    """Raise ``ConfigError`` if Slurm or Ray could never run the requested job.

    No-op without Slurm or Ray, and if ``request`` is None (a job without slots). The reasons are added to ``findings``; the
    error has all problems in ``findings``, including earlier ones. ``slots_key`` is the config key that the error names for a
    wrong slot count.
    """
    if services.engine is None or request is None:
        return
    # Not in the services' thread pool, which is for short calls: this may take seconds.
    for one in await asyncio.to_thread(services.backend.unsatisfiable_reasons, request):
        findings.problem(slots_key if one.key == SLOTS_KEY else one.key, one.got, one.expected, one.fix)
    findings.raise_if_any()
