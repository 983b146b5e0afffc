"""Measure how long the queue takes to place trials on many nodes, and what the placement needs of memory.

Usage: ``python benchmarks/placement.py [--nodes N] [--slots S] [--queued Q] [--seed N] [--json FILE]``

Simulated nodes, no process: the queue's own functions, called as the scheduler calls them. First all that fits is placed at once,
then trials end one after the other, and the queue is looked at after each. The baseline is the same queue on one node that has as
many slots, where nothing has to be placed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.store.nodes import slot_id_of

_SIZES = (1, 1, 1, 2, 2, 4, 8, 8, 16, 32, 64)
_ENDINGS = 200


def measure(num_nodes: int, num_slots: int, num_queued: int, seed: int) -> dict[str, float]:
    """Run the queue once.

    Args:
        num_nodes: how many nodes there are.
        num_slots: of each.
        num_queued: trials that wait, of 1 to 64 slots.
        seed: of their sizes.

    Returns:
        Milliseconds of the first look and of the looks after an ending (median and slowest), microseconds for each trial that
        was placed at first, how many those were, the share of slots in use then, and MiB of memory at most.
    """
    chance = random.Random(seed)
    enabled = {slot_id_of(node, index) for node in range(num_nodes) for index in range(num_slots)}
    queue = [Waiting(number, number, chance.choice(_SIZES), None) for number in range(num_queued)]
    free = set(enabled)
    tracemalloc.start()
    assignments(queue, free, enabled, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    began_s = time.perf_counter()
    placed = assignments(queue, free, enabled, {})
    first_s = time.perf_counter() - began_s
    running = dict(placed)
    free -= {slot for slots in running.values() for slot in slots}
    share = 1 - len(free) / len(enabled)
    queue = [one for one in queue if one.key not in running]
    looks_s = []
    for _ in range(min(_ENDINGS, len(running))):
        free.update(running.pop(chance.choice(list(running))))
        began_s = time.perf_counter()
        placed = assignments(queue, free, enabled, {})
        looks_s.append(time.perf_counter() - began_s)
        for key, slots in placed:
            running[key] = slots
            free.difference_update(slots)
        queue = [one for one in queue if one.key not in running]
    return {
        "first_ms": first_s * 1e3,
        "per_trial_us": first_s * 1e6 / max(len(running), 1),
        "num_placed": len(running),
        "share": share,
        "look_ms": statistics.median(looks_s) * 1e3,
        "slowest_ms": max(looks_s) * 1e3,
        "mib": peak / 2**20,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queued", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    many = measure(args.nodes, args.slots, args.queued, args.seed)
    one = measure(1, min(args.nodes * args.slots, 1000), args.queued, args.seed)
    print(f"| {args.queued} queued trials | {args.nodes} nodes of {args.slots} slots | one node | ratio |")
    print("|---|---|---|---|")
    rows = (
        ("first look, ms", "first_ms", ".1f"),
        ("first look, µs for each trial placed", "per_trial_us", ".0f"),
        ("look after an ending, median ms", "look_ms", ".2f"),
        ("look after an ending, slowest ms", "slowest_ms", ".2f"),
        ("memory at most, MiB", "mib", ".1f"),
    )
    for name, key, form in rows:
        print(f"| {name} | {many[key]:{form}} | {one[key]:{form}} | {many[key] / one[key]:.1f} |")
    print(f"| slots in use after the first look | {many['share']:.1%} | {one['share']:.1%} | |")
    if args.json is not None:
        args.json.write_text(json.dumps({"many": many, "one": one}))


if __name__ == "__main__":
    main()
