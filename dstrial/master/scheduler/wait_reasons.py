"""Log in the logs of trials and commands why they wait; never repeat a reason."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

from dstrial.master.scheduler.queue import Waiting
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.commands import CommandInfo
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line

logger = logging.getLogger("dstrial.master.scheduler")

Line: TypeAlias = "tuple[WaitingTrial | CommandInfo, Hashable, str]"  # a job, its reason, the text

_MAX_NAMED = 3  # slot users named in one line


def waiting_text(one: Waiting, num_enabled: int, live: Sequence[Allocation], before: str | None) -> str:
    """Return a log line about the slots a trial waits for and the jobs that use slots.

    ``before`` is the name of the first trial in the queue; None if the waiting trial is first.
    """
    wanted = f"waiting for {_slots(one.num_slots)}"
    own = sum(len(row.slots) for row in live if row.experiment_id == one.experiment_id)
    if one.max_slots is not None and own + one.num_slots > one.max_slots:
        return f"{wanted}: its experiment uses {own} of the {one.max_slots} that resources.max_slots allows"
    users = [row for row in live if row.slots]
    used = sum(len(row.slots) for row in users)
    if used + one.num_slots <= num_enabled and before is not None:
        return f"{wanted}: {before} is before it in the queue, and needs more than is free"
    named = [f"{_name(row)} on {len(row.slots)}" for row in users[:_MAX_NAMED]]
    if len(users) > _MAX_NAMED:
        named.append(f"{len(users) - _MAX_NAMED} others")
    held = f", by {', '.join(named)}" if named else ""
    return f"{wanted}: {used} of {num_enabled} {'are' if used != 1 else 'is'} in use{held}"


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def _name(row: Allocation) -> str:
    if row.is_command:
        return f"task {row.task_id}"
    return f"trial {row.trial_id} of experiment {row.experiment_id}"


class WaitReasons:
    """Logs why jobs wait. Do not call the methods inside ``Database.read``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._logged: dict[int | str, set[Hashable]] = {}  # by trial id or task id

    def forget_others(self, rows: Iterable[WaitingTrial | CommandInfo]) -> None:
        """Forget the logged reasons of all jobs except ``rows``, which still wait."""
        self._logged = {key: self._logged[key] for key in map(_key, rows) if key in self._logged}

    def log(self, lines: Iterable[Line], level: str = "WARNING") -> None:
        """Log lines, except those whose reason was logged since the job began to wait."""
        new = [line for line in lines if not self._has_logged(line[0], line[1])]
        if not new:
            return

        def write(tx: Transaction) -> None:
            for row, _, text in new:
                trial_id = row.id if isinstance(row, WaitingTrial) else None
                add_master_line(tx, row.task_id, trial_id, text, level=level)

        self._database.write(write)
        for row, reason, text in new:
            self._logged.setdefault(_key(row), set()).add(reason)
            logger.info("%s waits: %s", _key(row), text)

    def _has_logged(self, row: WaitingTrial | CommandInfo, reason: Hashable) -> bool:
        return reason in self._logged.get(_key(row), ())

    def lacks_slots(self, row: WaitingTrial | CommandInfo, num_slots: int) -> None:
        """Log that a trial or command needs more slots than the ``num_slots`` that exist."""
        name, wanted = (
            ("it", row.num_slots) if isinstance(row, CommandInfo) else ("the trial", row.slots_per_trial)
        )
        text = (
            f"{name} needs {_slots(wanted)} and waits; this master has {num_slots}. Enable what is switched off "
            "(`det agent list`, `det slot list`), look at hosts that are down, or add slots"
        )
        self.log([(row, ("slots", wanted, num_slots), text)])

    def waits_for_slots(
        self, waiting: Sequence[tuple[WaitingTrial, Waiting]], live: Sequence[Allocation], num_enabled: int
    ) -> None:
        """Log why each trial waits and which ``live`` allocations use slots.

        A trial gets at most one such line per run, and none if it needs more slots than are enabled.
        """
        begun = {row.trial_id for row in live}
        left = [(row, one) for row, one in waiting if row.id not in begun]
        lines: list[Line] = []
        for row, one in left:
            reason = ("queue", row.run_id)
            if one.num_slots <= num_enabled and not self._has_logged(row, reason):
                before = f"trial {left[0][0].id}" if row is not left[0][0] else None
                lines.append((row, reason, waiting_text(one, num_enabled, live, before)))
        self.log(lines, "INFO")


def _key(row: WaitingTrial | CommandInfo) -> int | str:
    return row.id if isinstance(row, WaitingTrial) else row.task_id
