"""Notification of coroutines and threads about published topics."""

from __future__ import annotations

import asyncio
import threading

from dstrial.master.pubsub import PubSub


def test_listening_thread_is_notified_by_event() -> None:
    changes = PubSub()
    event = changes.listen("scheduler")

    changes.publish(["other"])
    assert not event.is_set()
    changes.publish(["scheduler"])
    assert event.is_set()


def test_follower_receives_each_wanted_topic_once() -> None:
    changes = PubSub()

    async def follow() -> list[set[str]]:
        with changes.follow(lambda topic: topic.startswith("a")) as follower:
            changes.publish(["a1", "b1"])
            changes.publish(["a2", "a1"])
            found = [await follower.next(10)]
            waiting = asyncio.ensure_future(follower.next(10))
            await asyncio.sleep(0)
            threading.Thread(target=changes.publish, args=(["b2"],)).start()
            threading.Thread(target=changes.publish, args=(["a3"],)).start()
            found.append(await waiting)
            found.append(await follower.next(0.01))
        changes.publish(["a4"])
        return [*found, await follower.next(0.01)]

    assert asyncio.run(follow()) == [{"a1", "a2"}, {"a3"}, set(), set()]
