"""Log why trials and commands wait, in their own logs, each reason once."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from dstrial.master.scheduler.queue import Waiting
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.commands import CommandInfo
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line
from dstrial.visible_text import visible_line

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")


_MAX_NAMED = 3  # slot users named in one line


@dataclasses.dataclass(frozen=True, slots=True)
class SlotUser:
    """A trial or command that uses slots, as named in messages."""

    name: str  # for example ``trial 3 of experiment 2 (gpt)``
    experiment_id: int  # 0 for a command
    num_slots: int


def waiting_text(
    num_slots: int,
    num_enabled: int,
    slot_users: Sequence[SlotUser],
    *,
    experiment_id: int,
    max_slots: int | None,
    before: str | None,
) -> str:
    """Return a log line: how many slots a trial waits for, and which jobs use them.

    ``before`` names the first trial in the queue; None if the waiting trial is first.
    """
    wanted = f"waiting for {_slots(num_slots)}"
    own = sum(user.num_slots for user in slot_users if user.experiment_id == experiment_id)
    if max_slots is not None and own + num_slots > max_slots:
        return f"{wanted}: its experiment uses {own} of the {max_slots} that resources.max_slots allows"
    used = sum(user.num_slots for user in slot_users)
    if used + num_slots <= num_enabled and before is not None:
        return f"{wanted}: {before} is before it in the queue, and needs more than is free"
    named = [f"{user.name} on {user.num_slots}" for user in slot_users[:_MAX_NAMED]]
    if len(slot_users) > _MAX_NAMED:
        named.append(f"{len(slot_users) - _MAX_NAMED} others")
    held = f", by {', '.join(named)}" if named else ""
    return f"{wanted}: {used} of {num_enabled} {'are' if used != 1 else 'is'} in use{held}"


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


class WaitReasons:
    """Logs why jobs wait. Do not call the methods inside ``Database.read``."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._logged: dict[int | str, set[Hashable]] = {}  # by trial id or task id

    def forget_others(self, rows: Iterable[WaitingTrial | CommandInfo]) -> None:
        """Forget trials and commands that no longer wait."""
        self._logged = {key: self._logged[key] for key in map(_key, rows) if key in self._logged}

    def _has_logged(self, row: WaitingTrial | CommandInfo, reason: Hashable) -> bool:
        return reason in self._logged.get(_key(row), ())

    def has_logged_lacking(self, row: WaitingTrial, num_slots: int) -> bool:
        """Return whether :meth:`lacks_slots` has already logged its message for the trial."""
        return self._has_logged(row, ("slots", row.slots_per_trial, num_slots))

    def _log_once(
        self, lines: Sequence[tuple[WaitingTrial | CommandInfo, Hashable, str]], level: str = "WARNING"
    ) -> None:
        new = [line for line in lines if not self._has_logged(line[0], line[1])]
        if not new:
            return

        def write(tx: Transaction) -> None:
            for row, _, text in new:
                trial_id = row.id if isinstance(row, WaitingTrial) else None
                add_master_line(tx, row.task_id, trial_id, text, level=level)

        self._services.database.write(write)
        for row, reason, text in new:
            self._logged.setdefault(_key(row), set()).add(reason)
            logger.info("%s waits: %s", _key(row), text)

    def lacks_slots(self, row: WaitingTrial | CommandInfo, num_slots: int, why: str | None = None) -> None:
        """Log that a trial or command needs more slots than the ``num_slots`` that exist.

        ``why`` is the reason why a trial's checkpoint cannot resume on fewer slots; None if unknown.
        """
        services = self._services
        is_command = isinstance(row, CommandInfo)
        wanted = row.num_slots if isinstance(row, CommandInfo) else row.slots_per_trial
        has = (
            "no host has more than"
            if is_command and (services.hosts or services.engine)
            else "this master has"
        )
        text = f"{'it' if is_command else 'the trial'} needs {_slots(wanted)} and waits; {has} {num_slots}. "
        text += self._hint_more_slots(wanted)
        if why is not None:
            text += f". Its checkpoint cannot resume with fewer: {why}"
        self._log_once([(row, ("slots", wanted, num_slots), text)])

    def all_agents_are_off(self, rows: Iterable[WaitingTrial | CommandInfo]) -> None:
        text = f"the agent is disabled, so nothing starts. Enable it: `det agent enable {self._services.agent_id}`"
        self._log_once([(row, ("off", row.run_id), text) for row in rows])

    def waits_for_slots(
        self, waiting: Sequence[tuple[WaitingTrial, Waiting]], live: Sequence[Allocation], num_enabled: int
    ) -> None:
        """Log once per run why each trial waits, and which ``live`` allocations use slots."""
        begun = {row.trial_id for row in live}
        left = [pair for pair in waiting if pair[0].id not in begun]
        new = [
            (row, one)
            for row, one in left
            if one.num_slots <= num_enabled and not self._has_logged(row, ("queue", row.run_id))
        ]
        if not new:
            return
        with self._services.database.read() as connection:
            users = [_slot_user(connection, row) for row in live if row.slots]
        first = left[0][0].id
        lines = []
        for row, one in new:
            text = waiting_text(
                one.num_slots,
                num_enabled,
                users,
                experiment_id=one.experiment_id,
                max_slots=one.max_slots,
                before=f"trial {first}" if first != row.id else None,
            )
            lines.append((row, ("queue", row.run_id), text))
        self._log_once(lines, "INFO")

    def _hint_more_slots(self, num_slots: int) -> str:
        services = self._services
        down = [node.name for node in services.backend.nodes() if node.why_down is not None]
        if down:
            return f"Look at the hosts that are down: {', '.join(down)} (`det agent list`, `dstrial hosts check`)"
        if num_slots <= len(services.slots):
            return "Enable what is switched off (`det agent list`, `det slot list`)"
        if services.engine is not None:
            return f"Look at what {services.engine} offers (`det slot list`)"
        if services.hosts:
            return f"Add hosts, so that there are at least {num_slots} slots (`dstrial up --hostfile`)"
        return f"Start it again with at least {num_slots} (`dstrial up --slots`)"


def _key(row: WaitingTrial | CommandInfo) -> int | str:
    return row.id if isinstance(row, WaitingTrial) else row.task_id


def _slot_user(connection: Connection, allocation: Allocation) -> SlotUser:
    num_slots = len(allocation.slots)
    if allocation.is_command:
        return SlotUser(f"task {allocation.task_id}", 0, num_slots)
    experiment_id = allocation.experiment_id
    config = json.loads(experiment_rows.require(connection, experiment_id).config)
    called = visible_line(str(config.get("name")))
    name = f"trial {allocation.trial_id} of experiment {experiment_id} ({called})"
    return SlotUser(name, experiment_id, num_slots)
