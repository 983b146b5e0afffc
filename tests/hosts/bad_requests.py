"""Submit experiments and commands that every master must reject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from master_on_hosts import CONFIG, MasterOnHosts

_BATCH_OF_20 = {
    **CONFIG["hyperparameters"],
    "deepspeed_config": {"train_batch_size": 20, "optimizer": {"type": "AdamW"}},
}
_REFUSED: tuple[tuple[Mapping[str, Any], str], ...] = (
    (
        {"resources": {"slots_per_trial": 2}, "data": {"dstrial": {"min_slots": 3}}},
        "data.dstrial.min_slots is 3; expected at most 2, the slots_per_trial. Lower it.",
    ),
    (
        {"resources": {"slots_per_trial": 2}, "data": {"dstrial": {"max_slots": 1}}},
        "data.dstrial.max_slots is 1; expected at least 2, the slots_per_trial.",
    ),
    (
        {
            "resources": {"slots_per_trial": 2},
            "data": {"dstrial": {"max_slots": 3}},
            "hyperparameters": _BATCH_OF_20,
        },
        "data.dstrial.max_slots is 2 to 3 slots, none of which but 2 can share a batch of 20 records",
    ),
)


def refused_at_submission(master: MasterOnHosts) -> list[str]:
    """Submit all invalid experiments; return the output of ``det`` for each."""
    return [refused(master, changes, text) for changes, text in _REFUSED]


def refused_command(master: MasterOnHosts, config: Mapping[str, Any], *texts: str) -> str:
    """Submit a command; require a rejection with each text once; return the output."""
    before = master.det("command", "list", "--csv")
    (master.place / "command.yaml").write_text(yaml.safe_dump(config))
    done = master.command("det", "command", "run", "--config-file", "command.yaml", "true")
    assert done.returncode != 0, done.stdout
    assert [done.stdout.count(text) for text in texts] == [1] * len(texts), done.stdout
    assert master.det("command", "list", "--csv") == before
    return done.stdout.strip()


def refused(master: MasterOnHosts, changes: Mapping[str, Any], text: str) -> str:
    """Submit an experiment; require a rejection with the text; return the output."""
    before = master.det("experiment", "list", "--csv")
    done = master.command("det", "experiment", "create", *master.write(changes))
    assert done.returncode != 0, done.stdout
    assert done.stdout.count(text) == 1, done.stdout
    assert master.det("experiment", "list", "--csv") == before
    return done.stdout.strip()
