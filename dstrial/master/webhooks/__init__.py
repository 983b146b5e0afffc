"""Webhooks: creation, delivery and format of events.

``events`` enqueues an event in the transaction that causes it. ``delivery`` sends queued events in its own threads, so that no
other thread waits for a receiver.
"""

from __future__ import annotations
