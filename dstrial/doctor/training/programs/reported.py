"""Print what a trial has reported, as Determined's client reads it: JSON by group."""

from __future__ import annotations

import json
import sys

from determined.experimental import client


def main(words: list[str]) -> None:
    """Print group -> reports in their order, each of name -> value.

    Args:
        words: the trial's number and the groups.
    """
    trial = client.get_trial(int(words[0]))
    found = {group: [one.metrics for one in trial.iter_metrics(group)] for group in words[1:]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
