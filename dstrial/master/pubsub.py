"""Notify coroutines and threads of topics (strings) that database writes publish."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator


class Follower:
    """A subscription: collects published topics until ``next`` returns them."""

    def __init__(self, is_wanted: Callable[[str], bool], lock: threading.Lock) -> None:
        self._is_wanted = is_wanted
        self._lock = lock
        self._topics: set[str] = set()
        self._future: asyncio.Future[None] | None = None

    def add(self, topics: Iterable[str]) -> None:
        """Add the ``topics`` that match the subscription, and wake ``next``.

        The caller must hold the lock.
        """
        self._topics.update(filter(self._is_wanted, topics))
        if self._topics and self._future is not None:
            self._future.get_loop().call_soon_threadsafe(_finish, self._future)
            self._future = None

    async def next(self, timeout_s: float) -> set[str]:
        """Return the topics published since the last call; if there are none, wait.

        Returns when a topic is published, or an empty set after ``timeout_s``.
        """
        with self._lock:
            found, self._topics = self._topics, set()
            if found:
                return found
            self._future = future = asyncio.get_running_loop().create_future()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(future, timeout_s)
        with self._lock:
            self._future = None
            found, self._topics = self._topics, set()
        return found


class PubSub:
    """Notifies coroutines and threads of published topics; any thread may publish.

    To avoid lost wake-ups, subscribe before reading the database.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._thread_waiters: dict[str, set[threading.Event]] = {}
        self._followers: set[Follower] = set()

    def version(self, topic: str) -> int:
        """Return how many times a topic has been published so far."""
        with self._lock:
            return self._versions.get(topic, 0)

    def publish(self, topics: Iterable[str]) -> None:
        topics = tuple(topics)
        with self._lock:
            for follower in self._followers:
                follower.add(topics)
            for topic in topics:
                self._versions[topic] = self._versions.get(topic, 0) + 1
                for event in self._thread_waiters.get(topic, ()):
                    event.set()

    @contextlib.contextmanager
    def follow(self, is_wanted: Callable[[str], bool]) -> Iterator[Follower]:
        """Subscribe within the block to all topics for which ``is_wanted`` is true."""
        follower = Follower(is_wanted, self._lock)
        with self._lock:
            self._followers.add(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._followers.discard(follower)

    def listen(self, topic: str) -> threading.Event:
        """Return an event that every publication of a topic sets; the waiter clears it."""
        event = threading.Event()
        with self._lock:
            self._thread_waiters.setdefault(topic, set()).add(event)
        return event


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
