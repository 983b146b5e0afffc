"""Webhooks: which events are told to whom, and how they get there.

``events`` writes what is to be told into the database, in the transaction of what has happened; ``delivery`` sends it from
there in threads of its own, so that neither the scheduler nor the writer ever waits for a receiver.
"""

from __future__ import annotations
