"""What ``start.py`` starts: each training as a plain script and as a trial, with the same model, data and batches."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import start_marks
import start_model
import yaml

HERE = pathlib.Path(__file__).resolve().parent
_HF_OPTIONS = (
    f"--output_dir output --max_steps {start_marks.NUM_BATCHES} --per_device_train_batch_size 8 --learning_rate 2e-3 "
    f"--logging_steps 5 --eval_strategy no --save_strategy steps --save_steps {start_marks.NUM_BATCHES} "
    "--report_to none --disable_tqdm True --use_cpu True --deepspeed ds_config.json"
).split()


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One training.

    Attributes:
        name: of the experiment config that it follows, or "digits".
        model_def: directory below ``model_defs`` that its context directory is a copy of; None for an empty one.
        bare: the plain script, which torchrun starts.
        launched: what ``dstrial.launch`` starts: its options, or a script.
        options: words for both.
        metric: that the searcher asks for.
    """

    name: str
    model_def: str | None
    bare: str
    launched: tuple[str, ...]
    options: tuple[str, ...]
    metric: str

    @property
    def is_trial(self) -> bool:
        """Whether it is a trial class; a script is never a fork."""
        return self.launched[0] == "--trial"

    def write_context(self, directory: pathlib.Path) -> None:
        """Make the context directory, with the programs of this benchmark in it."""
        if self.model_def is None:
            directory.mkdir()
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE.parent / "model_defs" / self.model_def, directory, ignore=ignored)
        for program in HERE.glob("start_*.py"):
            shutil.copy(program, directory)
        (directory / "start_hyperparameters.json").write_text(json.dumps(self.hyperparameters(1)))

    def hyperparameters(self, num_ranks: int) -> dict[str, Any]:
        """Return those of its config; a pipeline has as many stages as there are ranks."""
        if self.model_def is None:
            return {"deepspeed_config": start_model.DS_CONFIG}
        config = yaml.safe_load((HERE.parent / "experiment_configs" / f"{self.name}.yaml").read_text())
        found: dict[str, Any] = config["hyperparameters"]
        if "num_stages" in found:
            found["num_stages"] = num_ranks
        return found

    def config(self, num_ranks: int, variables: list[str]) -> dict[str, Any]:
        """Return the experiment config of a single trial of 20 batches."""
        is_pipeline = "num_stages" in (hyperparameters := self.hyperparameters(num_ranks))
        return {
            "name": f"start-{self.name}",
            "entrypoint": " ".join(["python3 -m dstrial.launch", *self.launched, *self.options]),
            "environment": {"environment_variables": variables},
            "data": {"dstrial": {"pipeline_stages": num_ranks}} if is_pipeline else {},
            "hyperparameters": hyperparameters,
            "searcher": {
                "name": "single",
                "metric": self.metric,
                "max_length": {"batches": start_marks.NUM_BATCHES},
            },
            "resources": {"slots_per_trial": num_ranks},
            "max_restarts": 0,
        }


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="digits",
            model_def=None,
            bare="start_bare.py",
            launched=("--trial", "start_trial:StartTrial"),
            options=(),
            metric="validation_loss",
        ),
        Workload(
            name="stdlib_lm",
            model_def="stdlib_lm",
            bare="start_stdlib_lm_bare.py",
            launched=("--trial", "start_stdlib_lm:StartStdlibLmTrial"),
            options=(),
            metric="bits_per_char",
        ),
        Workload(
            name="hf_clm",
            model_def="hf_clm",
            bare="start_hf_clm_bare.py",
            launched=("start_hf_clm.py",),
            options=tuple(_HF_OPTIONS),
            metric="eval_loss",
        ),
    )
}
