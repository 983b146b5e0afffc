"""Sends webhook events in threads, with retries; a slow receiver delays no other."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dstrial.master.clock import now_us
from dstrial.master.store import webhooks
from dstrial.master.webhooks.payloads import body_of

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.webhooks")

RETRY_S = (1.0, 10.0)
"""Backoff before the second and third attempt, seconds, with a jitter of 50 %. Determined makes as many attempts within four
seconds (``backoffAttempts`` in ``shipper.go``), which is too short for the restart of a receiver."""

_NUM_SENDERS = 8
_IDLE_S = 60.0
_BACKOFF_S = 60.0  # backoff after a local error, for example a full disk


class Delivery:
    """Sends queued events, one at a time per webhook.

    Delivery is at least once: after a crash of the master, an unacknowledged event is sent again with the same ``event_id``.
    """

    def __init__(self, services: Services, retry_s: Sequence[float] = RETRY_S) -> None:
        self._services = services
        self._database = services.database
        self._retry_s = tuple(retry_s)
        self._event = services.pubsub.listen(webhooks.EVENTS_TOPIC)
        self._senders = ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="dstrial-webhook")
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._not_before_us: dict[int, int] = {}
        self._is_draining = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="dstrial-webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Send due events for at most ``drain_s``, then stop; the queue is persistent."""
        if self._thread.ident is None:
            return
        self._is_draining = True
        self._event.set()
        self._thread.join(drain_s)
        self._is_stopping = True
        self._event.set()
        self._services.webhook_sender.end()
        self._thread.join()
        self._senders.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        while not self._is_stopping:
            is_any_due = False
            try:
                wait_s, is_any_due = self._start_due()
            except Exception:
                logger.exception("webhook delivery failed and will be retried")
                wait_s = _BACKOFF_S
            if self._is_draining and not is_any_due:
                return
            self._event.wait(wait_s)
            self._event.clear()

    def _start_due(self) -> tuple[float, bool]:
        """Start sending due events; return the poll delay and whether any was due."""
        with self._database.read() as connection:
            rows = webhooks.next_events(connection)
        next_us = now_us() + int(_IDLE_S * 1e6)
        is_any_due = False
        for row in rows:
            with self._lock:
                if row.webhook_id in self._busy:
                    is_any_due = True
                    continue
                due_us = max(row.due_us, self._not_before_us.get(row.webhook_id, 0))
                is_due = due_us <= now_us() and len(self._busy) < _NUM_SENDERS
                if is_due:
                    self._busy.add(row.webhook_id)
            if is_due:
                self._senders.submit(self._send, row)
            elif due_us > now_us():
                next_us = min(next_us, due_us)
                continue
            is_any_due = True
        return max(0.0, (next_us - now_us()) / 1e6), is_any_due

    def _send(self, row: webhooks.DueEvent) -> None:
        try:
            self._attempt(row)
        except Exception:
            logger.exception("sending an event of webhook %d failed; it will be retried", row.webhook_id)
            # Without a stored result the event is retried.
            self._not_before_us[row.webhook_id] = now_us() + int(_BACKOFF_S * 1e6)
        finally:
            with self._lock:
                self._busy.discard(row.webhook_id)
            self._event.set()

    def _attempt(self, row: webhooks.DueEvent) -> None:
        services = self._services
        body = body_of(
            json.loads(row.event),
            row.type,
            node=services.agent_id,
            pool=services.settings.pool_name,
            base_url=services.settings.base_url,
        )
        started_s = time.monotonic()
        outcome = services.webhook_sender.post(row.url, body)
        if outcome is None:
            return
        retry_us = None
        if not outcome.is_delivered:
            waits = self._retry_s[row.num_attempts :]
            if outcome.may_retry and waits:
                retry_us = now_us() + int(waits[0] * random.uniform(0.5, 1.5) * 1e6)
            # Do not log the URL, which may be a secret.
            logger.warning(
                "webhook %d: %s after %.1f s; event %d %s",
                row.webhook_id,
                outcome.result,
                time.monotonic() - started_s,
                row.id,
                "is dropped" if retry_us is None else "will be retried",
            )
        self._database.write(
            lambda tx: webhooks.note_result(
                tx,
                row.webhook_id,
                row.id,
                outcome.result,
                is_delivered=outcome.is_delivered,
                retry_us=retry_us,
            )
        )
