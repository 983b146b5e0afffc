"""The command line of programs that do runs by seed, some at once, and say which ended right."""

from __future__ import annotations

import argparse
import concurrent.futures
from collections.abc import Callable


def main(run: Callable[[int], tuple[list[str], float]], about: str | None, workers: int = 2) -> int:
    """Do the runs of the command line; return the exit status.

    ``run`` takes a seed, returns what was done and its seconds, and raises what is wrong. ``about`` is the text of ``--help``.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=workers)
    args = parser.parse_args()
    num_right = 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        runs = {pool.submit(run, seed): seed for seed in range(args.seed, args.seed + args.runs)}
        for done in concurrent.futures.as_completed(runs):
            try:
                strikes, seconds = done.result()
            except Exception as error:  # noqa: BLE001  # a run's main: told, and the others go on
                print(f"seed {runs[done]}: WRONG: {type(error).__name__}: {error}", flush=True)
                continue
            num_right += 1
            print(f"seed {runs[done]} ({', '.join(strikes)}): right ({seconds:.0f} s)", flush=True)
    print(f"{num_right} of {args.runs} runs ended right")
    return int(num_right != args.runs)
