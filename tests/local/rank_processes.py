"""Run a function on forked ranks with Determined's DistributedContext."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from determined import core

from dstrial.ranks.sockets import free_port

DEADLINE_S = 60.0


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _rank_main(
    rank: int,
    size: int,
    ports: tuple[int, int],
    function: Callable[..., Any],
    args: Any,
    results: Any,
    num_nodes: int,
) -> None:
    local_size = size // num_nodes
    dist = core.DistributedContext(
        rank=rank,
        size=size,
        local_rank=rank % local_size,
        local_size=local_size,
        cross_rank=rank // local_size,
        cross_size=num_nodes,
        chief_ip="127.0.0.1",
        pub_port=ports[0],
        pull_port=ports[1],
    )
    try:
        results.put((rank, function(dist, *args)))
    except Exception as error:  # noqa: BLE001 - the test asserts on it
        results.put((rank, error))
    finally:
        dist.close()


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, num_nodes: int = 1, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Return the result or exception of ``function(dist, *args)`` of every rank.

    Raises AssertionError if a rank has no result after ``deadline_s``.
    """
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ports = (free_port(), free_port())
    processes = [
        fork.Process(target=_rank_main, args=(rank, size, ports, function, args, results, num_nodes))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    give_up_at_s = time.monotonic() + deadline_s
    try:
        while len(answers) < size:
            try:
                rank, answer = results.get(timeout=max(0.0, give_up_at_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"only ranks {sorted(answers)} of {size} have ended") from None
            answers[rank] = answer
    finally:
        for process in processes:
            if len(answers) < size:
                process.kill()
            process.join()
    return [answers[rank] for rank in range(size)]
