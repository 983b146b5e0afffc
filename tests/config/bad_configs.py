"""Invalid configs, each with the expected message of ``dstrial check``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.config import load_experiment
from dstrial.errors import ConfigError

EXPERIMENT = """\
name: test
entrypoint: model_def:MyTrial
hyperparameters:
  deepspeed_config: ds.json
searcher:
  name: single
  metric: loss
  max_length: {batches: 10}
"""

MODEL_DEF = """\
class MyTrial:
    pass
"""

DEEPSPEED = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


@dataclasses.dataclass(frozen=True)
class BadConfig:
    """A config with one mistake, and fragments of the message about the mistake."""

    mistake: str
    fragments: tuple[str, ...]
    deepspeed: Mapping[str, Any] | str | None = None
    experiment: str = EXPERIMENT
    slots: int = 1
    keys: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # changes of the DeepSpeed config; None removes a key
    says: str = ""  # DeepSpeed's own error; "accepted" if it trains with other settings


PIPELINE = EXPERIMENT + "data: {dstrial: {pipeline_stages: 2}}\nresources: {slots_per_trial: 2}\n"


def _read(row: dict[str, Any]) -> BadConfig:
    """Convert a row of ``bad_configs.yaml``.

    ``ds`` changes keys of the DeepSpeed config (null removes a key), ``json`` is its whole text; ``change`` replaces [old, new]
    text of the experiment config.
    """
    keys = row.get("ds", {})
    deepspeed = {key: value for key, value in {**DEEPSPEED, **keys}.items() if value is not None}
    old, new = row.get("change", ("", ""))
    assert old in EXPERIMENT, old
    experiment = PIPELINE if row.get("pipeline") else EXPERIMENT.replace(old, new) if old else EXPERIMENT
    message = row["message"]
    return BadConfig(
        row["mistake"],
        (message,) if isinstance(message, str) else tuple(message),
        row.get("json", deepspeed if keys else None),
        experiment,
        row.get("slots", 2 if row.get("pipeline") else 1),
        keys,
        row.get("says", ""),
    )


BAD_CONFIGS = tuple(map(_read, read_yaml(Path(__file__).with_suffix(".yaml"), "bad_configs.yaml").value))


def write(bad: BadConfig, directory: Path) -> tuple[Path, Path]:
    """Write the experiment's files; return its config path and context directory."""
    deepspeed = bad.deepspeed if bad.deepspeed is not None else DEEPSPEED
    text = deepspeed if isinstance(deepspeed, str) else json.dumps(deepspeed, indent=2)
    (directory / "ds.json").write_text(text, encoding="utf-8")
    (directory / "exp.yaml").write_text(bad.experiment, encoding="utf-8")
    (directory / "model_def.py").write_text(MODEL_DEF, encoding="utf-8")
    return directory / "exp.yaml", directory


def message(bad: BadConfig, directory: Path) -> str:
    """Return the check's message about a config, without the directory's path."""
    path, context_dir = write(bad, directory)
    slots = bad.slots if bad.experiment is EXPERIMENT else None
    try:
        load_experiment(path, context_dir, slots=slots)
    except ConfigError as error:
        return str(error).replace(f"{directory}/", "").replace(str(directory), ".")
    return ""
