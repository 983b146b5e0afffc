"""Reconcile the processes of live allocations with their rows in the database."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrial.config.schema import compile_pattern
from dstrial.errors import DstrialError
from dstrial.master.backends.backend import (
    AllocationExit,
    AllocationRequest,
    Output,
    RunRef,
    SlotsGoneError,
    run_of,
)
from dstrial.master.backends.failures import explain_failure, first_traceback
from dstrial.master.backends.log_file import CHUNK_BYTES, printed, read_lines
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import allocations, endings
from dstrial.master.lifecycle import commands as life
from dstrial.master.scheduler import commands
from dstrial.master.scheduler.backoff import Backoff
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import nodes
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Transaction
from dstrial.master.store.reports.logs import LogOwner, add_lines, add_master_line
from dstrial.master.webhooks import events

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_POLL_S = 0.2  # interval of polls of all allocations
_KILL_RETRY_S = 2.0  # interval of repeated kills of an allocation that has not ended


@dataclasses.dataclass(frozen=True, slots=True)
class LogPolicy:
    """A compiled entry of the config's ``log_policies``."""

    name: str | None  # becomes the trial's ``logPolicyMatched`` after a match
    text: str  # the pattern, as written in the config
    pattern: Any  # compiled; searched in every line
    action: str | None  # ``cancel_retries``, ``exclude_node`` or None


@dataclasses.dataclass(slots=True)
class _State:
    """The reconciler's state of a live allocation."""

    policies: tuple[LogPolicy, ...] | None = None
    kill_again_s: float = 0.0  # monotonic time
    is_terminated: bool = False  # whether SIGTERM was sent (commands only)
    deadline: tuple[int, float] | None = None  # preemption deadline as stored, and on the monotonic clock


class Reconciler:
    """Starts, polls and ends allocations; used only by the scheduler's thread."""

    def __init__(self, services: Services, backoff: Backoff) -> None:
        self._services = services
        self._database = services.database
        self._backend = services.backend
        self._backoff = backoff  # by allocation id
        self._states: dict[str, _State] = {}
        self._next_poll_s = 0.0  # monotonic time

    def adopt(self, rows: Iterable[Allocation]) -> None:
        """Find the processes of allocations from an earlier master; mark them as RUNNING."""
        for row in rows:
            run = run_of(row)
            handle = self._backend.find(run)
            if handle is not None:
                logger.info("allocation %s is adopted (pid %d)", row.id, handle.pid)
                if row.state == "ASSIGNED":
                    self._started(row, run)

    def poll(self, rows: Sequence[Allocation], *, is_due: bool) -> float:
        """Poll the allocations ``rows`` if ``is_due`` or the poll interval has passed.

        ``rows`` are all live allocations. Returns the seconds until the next poll; infinity if ``rows`` is empty.
        """
        if not rows:
            return math.inf
        if not is_due and time.monotonic() < self._next_poll_s:
            return self._next_poll_s - time.monotonic()
        self._states = {row.id: self._states.get(row.id) or _State() for row in rows}
        has_more = False
        for row in rows:
            if not self._backoff.delay_s(row.id):
                has_more |= self._poll_one(row)
        wait_s = 0.0 if has_more else max(_POLL_S, min(self._backoff.delay_s(row.id) for row in rows))
        self._next_poll_s = time.monotonic() + wait_s
        return wait_s

    def _poll_one(self, row: Allocation) -> bool:
        """Reconcile an allocation; return whether more of its output is ready to be read.

        An error is logged and postpones the next poll of this allocation.
        """
        self._services.record_scheduler_step(f"polling allocation {row.id}")
        try:
            has_more = self._reconcile(row, run_of(row), self._states[row.id])
        except Exception:
            logger.exception("polling allocation %s failed; retrying", row.id)
            self._backoff.record_failure(row.id)
            return False
        self._backoff.forget(row.id)
        return has_more

    def _reconcile(self, row: Allocation, run: RunRef, state: _State) -> bool:
        """Store an allocation's new output and exit; carry out stop and kill requests.

        Returns whether more output is ready to be read.
        """
        # Kill first, as reading files may fail.
        if row.kill_us is not None and time.monotonic() > state.kill_again_s:
            state.kill_again_s = time.monotonic() + _KILL_RETRY_S
            self._backend.kill(run)
        # Observe before reading output, so that everything printed before the exit is read.
        exit_ = self._backend.observe(run)
        if row.state == "ASSIGNED" and len(self._backend.supervisors(run)) == len(run.allocated):
            self._started(row, run)
        self._add_notes(row, run)
        if exit_ is None:
            self._stop_if_due(row, run, state)
            commands.watch(self._services, row)
        has_more = self._read_outputs(row, run, state)
        if exit_ is not None and not has_more:
            self._end(row, run, exit_)
        return has_more

    def _add_notes(self, row: Allocation, run: RunRef) -> None:
        notes = self._backend.notes(run)
        if not notes:
            return

        def add(tx: Transaction) -> None:
            for note in notes:
                add_master_line(
                    tx, row.task_id, row.trial_id or None, note, level="WARNING", allocation_id=row.id
                )

        self._database.write(add)

    def _stop_if_due(self, row: Allocation, run: RunRef, state: _State) -> None:
        if row.kill_us is not None:
            return
        if row.preempt_us is None:
            why = self._backend.leaving_reason(run)
            if why is not None:
                self._database.write(lambda tx: release(tx, row, why, is_kill=False))
        elif row.is_command and not state.is_terminated:
            state.is_terminated = True
            self._backend.ask_to_stop(run)
        expired = _expired_grace_period(row, state)
        if expired is not None:
            text = f"it did not stop within {expired}"
            self._database.write(lambda tx: release(tx, row, text, is_kill=True))

    def _read_outputs(self, row: Allocation, run: RunRef, state: _State) -> bool:
        """Store new output of an allocation; return whether more is ready to be read."""
        parts: Mapping[int, nodes.AllocationNode] = {}
        if not run.is_on_own_node:
            with self._database.read() as connection:
                parts = nodes.parts_of(connection, row.id)
        has_more = False
        for output in self._backend.outputs(run):
            part = parts.get(output.node_id)
            offset = row.log_offset if part is None else part.log_offset
            has_more |= self._read_output(row, state, output, offset)
        return has_more

    def _read_output(self, row: Allocation, state: _State, output: Output, offset: int) -> bool:
        read = read_lines(output.directory, offset, CHUNK_BYTES)
        lines = read.lines
        if not lines:
            return read.has_more
        matched = matches(self._policies_of(row, state), (line.text for line in lines))
        triggered = self._services.log_triggers.find(line.text for line in lines)
        name = self._services.node_name(output.node_id)

        def store(tx: Transaction) -> None:
            if nodes.advance_log(tx, row.id, output.node_id, offset, read.end, len(lines)):
                quota = self._services.settings.trial_log_bytes
                owner = LogOwner(row.task_id, row.trial_id or None, row.id)
                add_lines(tx, owner, lines, quota)
                note_matches(tx, row, matched, output.node_id, name)
                events.notify_lines(tx, row.task_id, triggered)

        self._database.write(store)
        return read.has_more

    def _policies_of(self, row: Allocation, state: _State) -> tuple[LogPolicy, ...]:
        if row.is_command:
            return ()
        if state.policies is None:
            with self._database.read() as connection:
                experiment = experiment_rows.require(connection, row.experiment_id)
            state.policies = compile_policies(json.loads(experiment.config))
        return state.policies

    def launch(self, row: Allocation, request: Callable[[], AllocationRequest]) -> None:
        """Start the allocation that ``request()`` describes; end it if the start fails."""
        run = run_of(row)
        try:
            handle = self._backend.submit(request(), run)
        except Exception as error:
            if not isinstance(error, DstrialError | OSError):
                logger.exception("allocation %s could not be started", row.id)
            self._end(row, run, failed_start(error))
            return
        if handle is not None:
            self._started(row, run)

    def _started(self, row: Allocation, run: RunRef) -> None:
        found = self._backend.supervisors(run)
        handle = found.get(nodes.OWN_NODE)

        def write(tx: Transaction) -> None:
            for node_id, other in found.items():
                if node_id != nodes.OWN_NODE:
                    nodes.update_part(tx, row.id, node_id, pid=other.pid, start_time=other.start_time)
            if row.is_command:
                life.started(tx, row.id, handle)
                return
            allocations.started(tx, row.id, handle)
            # A line of Determined's launcher (harness/determined/exec/launch.py) that scripts search for.
            text = (
                f"New trial runner in (container {row.resources_id}) on agent {self._services.agent_of(row)}"
            )
            add_master_line(tx, row.task_id, row.trial_id, text, allocation_id=row.id)

        self._database.write(write)

    def _end(self, row: Allocation, run: RunRef, exit_: AllocationExit) -> None:
        traceback = None
        if exit_.exit_code != 0:
            for output in self._backend.outputs(run):
                exit_, traceback = _with_explanation(output.directory, exit_)
                if traceback is not None or exit_.explanation is not None:
                    break
        exited: Callable[..., None] = life.exited
        if not row.is_command:
            trouble = None if exit_.exit_code == 0 else self._services.storages.trouble_of(row.experiment_id)
            begun = self._backend.begun_checkpoints(run)
            exited = functools.partial(allocations.allocation_exited, storage_trouble=trouble, begun=begun)

        def end(tx: Transaction) -> None:
            for one in exit_.nodes:
                nodes.update_part(
                    tx, row.id, one.node_id, exit_code=one.exit_code, signal=one.signal, cause=one.cause
                )
            exited(tx, row.id, exit_, traceback)

        self._database.write(end)
        self._services.activity.forget(row.task_id)
        self._backoff.forget(row.id)
        self._backend.forget(run)


def release(tx: Transaction, row: Allocation, why: str, *, is_kill: bool) -> None:
    """Request a stop or, if ``is_kill``, a kill of an allocation; log ``why``."""
    if row.is_command:
        life.release(tx, row, why, is_kill=is_kill)
    else:
        endings.release(tx, row.trial_id, why, is_kill=is_kill)


def _expired_grace_period(row: Allocation, state: _State) -> str | None:
    """Return a stop request's grace period as text if it has expired, else None."""
    deadline_us = row.preempt_deadline_us
    if deadline_us is None:
        return None
    limit_s = (deadline_us - (row.preempt_us or now_us())) / 1e6
    if state.deadline is None or state.deadline[0] != deadline_us:
        # Counted on the monotonic clock: a jump of the wall clock, or a suspended machine, must not end a save.
        state.deadline = (deadline_us, time.monotonic() + limit_s)
    if time.monotonic() < state.deadline[1]:
        return None
    if row.preempt_us is None:
        return "its grace period"
    return f"{limit_s:.0f} s" if row.is_command else f"preemption_timeout ({limit_s:.0f} s)"


def _with_explanation(directory: Path, exit_: AllocationExit) -> tuple[AllocationExit, str | None]:
    """Return (exit with an explanation, traceback) of a failed allocation.

    The traceback is the first one in the output in ``directory``; None if there is none. If ``exit_`` already has an
    explanation, it is not replaced.
    """
    traceback = first_traceback(printed(directory))
    if exit_.explanation is None:
        exit_ = dataclasses.replace(exit_, explanation=explain_failure(printed(directory), traceback))
    return exit_, traceback


def failed_start(error: Exception) -> AllocationExit:
    """Return the exit of an allocation that failed to start.

    The allocation counts as lost if ``error`` is ``SlotsGoneError``.
    """
    was_lost = isinstance(error, SlotsGoneError)
    return AllocationExit(1, None, now_us(), f"could not be started: {error!s}", was_lost)


def compile_policies(config: Mapping[str, Any]) -> tuple[LogPolicy, ...]:
    """Return the log policies of a validated config, except those without a pattern."""
    found = []
    for policy in config.get("log_policies") or []:
        text, action = policy.get("pattern"), policy.get("action")
        if text:
            kind = action.get("type") if isinstance(action, Mapping) else action
            found.append(LogPolicy(policy.get("name"), text, compile_pattern(text), kind))
    return tuple(found)


def matches(policies: Iterable[LogPolicy], texts: Iterable[str]) -> list[tuple[LogPolicy, str]]:
    """Return (policy, first matching line) of each log policy that matches a line."""
    patterns = [(policy, policy.pattern) for policy in policies]
    return events.first_matches(patterns, "".join(texts).splitlines()) if patterns else []


def note_matches(
    tx: Transaction, row: Allocation, matched: list[tuple[LogPolicy, str]], node_id: int, name: str
) -> None:
    """Store and apply the log policies that matched a node's output.

    ``name`` is the node's name. Only the first match of each action is logged in the trial's log.
    """
    for policy, line in matched:
        if policy.name is not None:
            trial_rows.update(tx, row.trial_id, log_policy_matched=policy.name)
        column: Literal["retry_cancelled", "is_node_excluded"]
        if policy.action == "cancel_retries":
            column, then = "retry_cancelled", "the trial will not be started again if it fails"
        elif policy.action == "exclude_node":
            # Source: Determined 0.38.1, master/internal/logpattern, addRetryOnDifferentNode.
            nodes.exclude(tx, row.trial_id, node_id)
            column, then = "is_node_excluded", f"therefore will not schedule on {name} again if it fails"
        else:
            continue
        if trial_rows.set_flag(tx, row.trial_id, column):
            text = f'(log {json.dumps(line, ensure_ascii=False)} matched regex "{policy.text}") {then}'
            add_master_line(tx, row.task_id, row.trial_id, text, level="WARNING", allocation_id=row.id)
