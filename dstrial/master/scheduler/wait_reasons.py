"""Logs why trials and commands wait, each reason once."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from dstrial.master.scheduler.queue import SlotUser, Waiting, waiting_text
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


class WaitReasons:
    """Called by the scheduler's thread, outside of any snapshot."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._said: dict[int | str, set[Hashable]] = {}  # by trial id or task id

    def forget_others(self, rows: Iterable[WaitingTrial | CommandInfo]) -> None:
        """Forget what was said of trials and commands that no longer wait."""
        self._said = {key: self._said[key] for key in map(_key, rows) if key in self._said}

    def _has_said(self, row: WaitingTrial | CommandInfo, reason: Hashable) -> bool:
        return reason in self._said.get(_key(row), ())

    def has_said_lacking(self, row: WaitingTrial, num_slots: int) -> bool:
        """Return whether :meth:`lacks_slots` would say nothing new."""
        return self._has_said(row, ("slots", row.slots_per_trial, num_slots))

    def _say(
        self, lines: Sequence[tuple[WaitingTrial | CommandInfo, Hashable, str]], level: str = "WARNING"
    ) -> None:
        new = [line for line in lines if not self._has_said(line[0], line[1])]
        if not new:
            return

        def write(tx: Transaction) -> None:
            for row, _, text in new:
                trial_id = row.id if isinstance(row, WaitingTrial) else None
                add_master_line(tx, row.task_id, trial_id, text, level=level)

        self._services.database.write(write)
        for row, reason, text in new:
            self._said.setdefault(_key(row), set()).add(reason)
            logger.info("%s waits: %s", _key(row), text)

    def lacks_slots(self, row: WaitingTrial | CommandInfo, num_slots: int, why: str | None = None) -> None:
        """Log which slots a trial or command lacks; ``why`` is its checkpoint's."""
        services = self._services
        is_command = isinstance(row, CommandInfo)
        wanted = row.num_slots if isinstance(row, CommandInfo) else row.slots_per_trial
        slots = f"{wanted} slot{'s' if wanted != 1 else ''}"
        has = (
            "no host has more than"
            if is_command and (services.hosts or services.engine)
            else "this master has"
        )
        text = f"{'it' if is_command else 'the trial'} needs {slots} and waits; {has} {num_slots}. "
        text += self._how_to_have(wanted)
        if why is not None:
            text += f", for its checkpoint cannot go on with fewer: {why}"
        self._say([(row, ("slots", wanted, num_slots), text)])

    def all_agents_are_off(self, rows: Iterable[WaitingTrial | CommandInfo]) -> None:
        how = f"`det agent enable {self._services.agent_id}`"
        text = f"the agent is disabled, and nothing starts; go on with {how}"
        self._say([(row, ("off", row.run_id), text) for row in rows])

    def waits_for_slots(
        self, waiting: Sequence[tuple[WaitingTrial, Waiting]], live: Sequence[Allocation], num_enabled: int
    ) -> None:
        """Say once per run for which slots a trial waits, and what holds them."""
        begun = {row.trial_id for row in live}
        left = [pair for pair in waiting if pair[0].id not in begun]
        new = [
            (row, one)
            for row, one in left
            if one.num_slots <= num_enabled and not self._has_said(row, ("queue", row.run_id))
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
        self._say(lines, "INFO")

    def _how_to_have(self, num_slots: int) -> str:
        """Say what gives a master more slots."""
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
