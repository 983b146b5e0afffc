"""Launch runs of ``trainer_program.py`` and read their results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dstrial.local.checkpoint_directory import list_checkpoints, newest_checkpoint
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_script

PROGRAM = Path(__file__).with_name("trainer_program.py")


class Runs:
    """Launches runs of ``trainer_program.py`` and reads their results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directories: dict[str, Path] = {}
        self.facts: dict[str, list[dict[str, Any]]] = {}

    def settings(self, name: str, directory_of: str | None = None, **asked: Any) -> dict[str, Any]:
        """Return the settings of a run, in the directory of run ``directory_of`` if given."""
        source = directory_of or name
        if source not in self.directories:
            made = RunDirectory.create(
                self.directory / "runs", name=source, context_dir=self.directory, command=["test"], config={}
            )
            self.directories[source] = made.path
        self.directories[name] = self.directories[source]
        return {
            "name": name,
            "run_dir": str(self.directories[name]),
            "output": str(self.directory / "output" / source),
            **asked,
        }

    def copied(self, name: str, source: str) -> None:
        """Copy the directory of run ``source`` for run ``name``."""
        path = self.directories[source]
        self.directories[name] = path.with_name(f"{path.name}-{name}")
        shutil.copytree(path, self.directories[name])

    def of_another_trial(self, source: str) -> str:
        """Copy a run's newest checkpoint with the id of another trial; return its path."""
        path = self.directory / f"of-another-trial-{source}"
        shutil.copytree(self.checkpoint(source), path)
        metadata = json.loads((path / "metadata.json").read_text())
        (path / "metadata.json").write_text(json.dumps({**metadata, "trial_id": metadata["trial_id"] + 1}))
        return str(path)

    def launch(self, num_ranks: int, *runs: dict[str, Any]) -> None:
        """Run all ``runs`` in one launch, because importing transformers takes long."""
        path = self.directory / f"{num_ranks}-{runs[0]['name']}.json"
        path.write_text(json.dumps([{k: v for k, v in run.items() if k != "name"} for run in runs]))
        run_script(PROGRAM, num_ranks, str(path), deadline_s=400, env={"HF_HUB_OFFLINE": "1"})
        by_rank = [json.loads(path.with_name(f"{path.name}.{rank}").read_text()) for rank in range(num_ranks)]
        for idx, run in enumerate(runs):
            self.facts[run["name"]] = [of_rank[idx] for of_rank in by_rank]

    def reports(self, name: str, group: str) -> dict[int, dict[str, Any]]:
        rows = [
            json.loads(line) for line in (self.directories[name] / "metrics.jsonl").read_text().splitlines()
        ]
        found = [(row["steps_completed"], row["metrics"]) for row in rows if row["group"] == group]
        assert len(found) == len(dict(found)), "a step was reported twice"
        return dict(found)

    def losses(self, name: str) -> dict[int, float]:
        return {step: metrics["loss"] for step, metrics in self.reports(name, "training").items()}

    def evaluations(self, name: str) -> dict[int, float]:
        return {step: metrics["eval_loss"] for step, metrics in self.reports(name, "validation").items()}

    def checkpoint(self, name: str) -> Path:
        newest = newest_checkpoint(self.directories[name] / "checkpoints")
        assert newest is not None
        return newest.path

    def steps_of_checkpoints(self, name: str) -> list[int]:
        return [found.steps_completed for found in list_checkpoints(self.directories[name] / "checkpoints")]
