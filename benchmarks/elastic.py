"""A trial of four slots over four hosts that follows what happens to them, beside one that is left alone.

Machines are namespaces (``tests/hosts/machines.py``), with the master on the first. For each change of slots: seconds from
what made it to the first report with the new number, seconds of training lost, and batches that were trained twice. Below the
table: whether each batch counts once, and how far the losses are from those of the trial that was left alone.

``python benchmarks/elastic.py [--batches N] [--json FILE]``; needs root and sshd.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from elastic_run import NUM_HOSTS, ElasticRun, Outcome
from machines import Machines, missing


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=300, help="of the trial (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    args = parser.parse_args()
    lacking = missing()
    if lacking:
        print(f"not possible here: {lacking}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="de-", dir="/tmp") as root:
        made = Machines(NUM_HOSTS + 1, Path(root, "machines"))
        try:
            place = Path(root, "place")
            place.mkdir()
            outcome, alone = measure(made, place, args.batches)
        finally:
            made.close()
    show(outcome, alone, args.batches)
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in outcome.changes], indent=1))
    return 0


def measure(made: Machines, place: Path, num_batches: int) -> tuple[Outcome, dict[int, float]]:
    """Run both trials; return what became of the one, and the losses of the other by batch."""
    run = ElasticRun(made, place, num_batches)
    run.up()
    alone = run.alone()
    run.begin(min_slots=1, resize_period=30)
    master, cut, dead = run.master, made[NUM_HOSTS], made[NUM_HOSTS - 1]
    urgent = (
        "command",
        "run",
        "-d",
        "--config",
        "resources.slots=1",
        "--config",
        "resources.priority=10",
        "sleep 40",
    )
    run.do("host5 is drained", lambda: master.det("agent", "disable", "host5", "--drain"), 3)
    run.do(f"{cut.name}'s cable is cut", cut.cut, 2)
    run.do("its cable is healed", cut.heal, 3)
    run.do("a command of a higher priority comes", lambda: master.det(*urgent), 2)
    run.do("it is gone", lambda: None, 3)
    run.do("host5 is switched on again", lambda: master.det("agent", "enable", "host5"), 4)
    run.do(f"{dead.name} loses its power", dead.kill, 3)
    outcome = run.end()
    master.down("--now")
    return outcome, alone


def show(outcome: Outcome, alone: dict[int, float], num_batches: int) -> None:
    """Print the table."""
    print("| what happens | slots | until the first report, s | training lost, s | batches again |")
    print("|---|---|---|---|---|")
    for one in outcome.changes:
        print(
            f"| {one.what} | {one.before} to {one.after} | {one.waited_s:.1f} | {one.lost_s:.1f} | {one.again} |"
        )
    is_whole = outcome.reported == tuple(range(1, num_batches + 1))
    furthest = max(abs(outcome.losses[batch] - loss) / abs(loss) for batch, loss in alone.items() if loss)
    last = max(alone)
    print(f"\nreports: {'each batch counts once' if is_whole else outcome.reported}")
    print(f"loss of batch {last}: {outcome.losses[last]:.8g}; left alone: {alone[last]:.8g}")
    print(f"furthest loss of {len(alone)}: {furthest:.2g} of its value")


if __name__ == "__main__":
    sys.exit(main())
