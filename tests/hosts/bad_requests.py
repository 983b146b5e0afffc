"""Submit experiments and commands that every master must reject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from master_on_hosts import MasterOnHosts


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
