"""Records what a master answers to Determined's web interface, asked by the generated client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normalization import normalized
from record import ROOT


def answers(scratch: Path) -> dict[str, str]:
    """Record the answers about a search that has ended, in a master that stands still."""
    from determined.common import api

    sys.path.append(str(ROOT / "tests" / "master"))
    from serving import serving

    with serving(scratch / "state") as master:
        session = api.Session(master.address, "determined", master.tokens["determined"], None)
        _seed(master)
        sections = [f"{name}\n{_text(ask(session))}\n" for name, ask in _questions().items()]
        literals = {str(scratch): "scratch", f'"{master.services.agent_id}"': '"host"'}
    return {"web.txt": normalized("\n".join(sections), literals, ["wallClockTime"])}


def _seed(master: Any) -> None:
    """Make experiment 1 a search of two trials that has ended, with metrics, labels, files and metadata."""
    from dstrial.master.store.reports import metrics

    config = {
        "name": "golden search",
        "description": "of rates",
        "searcher": {"name": "random", "metric": "loss", "max_trials": 2},
        "hyperparameters": {
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            "model": {
                "depth": {"type": "categorical", "vals": [2, 4]},
                "name": {"type": "const", "val": "net"},
            },
            "api_key": {"type": "const", "val": "hunter2"},
        },
        "resources": {"slots_per_trial": 1},
        "entrypoint": "true",
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/nonexistent"},
    }
    hparams = {"lr": 0.1, "model": {"depth": 2, "name": "net"}, "api_key": "hunter2"}

    def write(tx: Any) -> None:
        tx.execute(
            "UPDATE experiments SET config = ?, name = 'golden search', description = 'of rates', searcher_type = 'random', "
            "labels = '[\"a\", \"b\"]', state = 'COMPLETED', start_us = 1000000, end_us = 91000000 WHERE id = 1",
            (json.dumps(config),),
        )
        tx.execute("UPDATE experiments SET labels = '[\"b\"]' WHERE id = 2")
        tx.execute(
            "UPDATE trials SET hparams = ?, metadata = ?, state = 'COMPLETED', start_us = 1000000, end_us = 61000000 "
            "WHERE id = 1",
            (json.dumps(hparams), json.dumps({"note": "n", "where": {"rack": 3}})),
        )
        tx.execute(
            "INSERT INTO trials (id, experiment_id, request_id, state, hparams, seed, task_id, run_id, start_us, end_us) "
            "VALUES (3, 1, 'second', 'ERROR', ?, 1, '1.second', 1, 1000000, 91000000)",
            (json.dumps({**hparams, "lr": 0.01}),),
        )
        for trial_id, offset in ((1, 0.0), (3, 1.0)):
            for steps in range(1, 5):
                training = {"loss": offset + 1 / steps, "epoch": steps / 2}
                _report(tx, metrics, trial_id, "training", steps, training)
            _report(tx, metrics, trial_id, "validation", 4, {"loss": offset + 0.5, "note": "text"})
            _report(tx, metrics, trial_id, "throughput", 4, {"records": "NaN" if offset else 7})

    master.services.database.write(write)


def _report(tx: Any, metrics: Any, trial_id: int, group: str, steps: int, values: dict[str, Any]) -> None:
    metrics.add_report(
        tx,
        trial_id=trial_id,
        run_id=1,
        group=group,
        steps=steps,
        end_us=steps * 10**6,
        metrics=values,
    )


def _questions() -> dict[str, Callable[[Any], Any]]:
    """Return what is asked, by a name for people."""
    from determined.common.api import bindings as b

    return {
        "PUT experiments/1/labels/new": lambda session: b.put_PutExperimentLabel(
            session, experimentId=1, label="new"
        ),
        "DELETE experiments/1/labels/a": lambda session: b.delete_DeleteExperimentLabel(
            session, experimentId=1, label="a"
        ),
        "GET resource-pools/default/workspace-bindings": lambda session: b.get_ListWorkspacesBoundToRP(
            session, resourcePoolName="default"
        ),
    }


def _text(answer: Any) -> str:
    """Return an answer as JSON; a stream line by line."""
    if answer is None:
        return "(nothing)"
    parts = [answer] if hasattr(answer, "to_json") else list(answer)
    return "\n".join(json.dumps(one.to_json(omit_unset=True), indent=1, ensure_ascii=False) for one in parts)
