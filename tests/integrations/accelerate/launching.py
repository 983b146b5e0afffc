"""Launch an Accelerate script with a config, and read its run directory."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import warm_start
import yaml

DEADLINE_S = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    output: str
    run: Path

    def rows(self, group: str) -> dict[int, dict[str, Any]]:
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        found = [(row["steps_completed"], row["metrics"]) for row in rows if row["group"] == group]
        assert len(found) == len(dict(found)), "a batch was reported twice"
        return dict(found)

    def values(self, group: str, metric: str) -> dict[int, Any]:
        return {batch: metrics[metric] for batch, metrics in self.rows(group).items()}

    @property
    def checkpoints(self) -> dict[int, Path]:
        marks = sorted(self.run.glob("checkpoints/*/COMPLETE"))
        return {json.loads(mark.read_text())["steps_completed"]: mark.parent for mark in marks}


def launch(
    directory: Path,
    program: Path,
    experiment: Mapping[str, Any],
    *arguments: str,
    slots: int = 2,
    run: Path | None = None,
    exit_code: int = 0,
    **env: str,
) -> Launched:
    """Launch a program; ``run`` is an existing run directory, None for a new one."""
    shutil.copy(program, directory)
    (directory / "e.yaml").write_text(yaml.safe_dump(experiment))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    ended = warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", str(slots), program.name, *arguments],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env},
        timeout=DEADLINE_S,
        is_merged=True,
    )
    assert ended.returncode == exit_code, ended.stdout
    if run is None:
        (run,) = directory.glob("runs/*/*")
    return Launched(ended.stdout, run)
