"""Bad configurations and the message of ``dstrial check`` about each."""

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


NOT_IN_0_19_0 = frozenset(
    {
        "removed optimizer",
        "parameter that Muon ignores",
        "unknown top-level key",
        "removed section, switched off",
        "removed ZeRO key",
        "bucket size of zero",
        "no gradient norm with the default clipping",
    }
)
"""Mistakes that are none in DeepSpeed 0.19.0, or are told with other words."""


@dataclasses.dataclass(frozen=True)
class BadConfig:
    """One mistake and fragments of the sentence about it."""

    mistake: str
    fragments: tuple[str, ...]
    deepspeed: Mapping[str, Any] | str | None = None
    experiment: str = EXPERIMENT
    slots: int = 1
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # changed in DeepSpeed's JSON
    says: str = ""  # what DeepSpeed itself says, late; or "accepted", where it trains something else


PIPELINE = EXPERIMENT + "data: {dstrial: {pipeline_stages: 2}}\nresources: {slots_per_trial: 2}\n"


def _read(row: dict[str, Any]) -> BadConfig:
    """Read a row: ``ds`` changes keys of the JSON (null removes one), ``json`` is its text, ``change`` is [old, new] text."""
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
    """Write the experiment; return the paths of its config and of its context directory."""
    deepspeed = bad.deepspeed if bad.deepspeed is not None else DEEPSPEED
    text = deepspeed if isinstance(deepspeed, str) else json.dumps(deepspeed, indent=2)
    (directory / "ds.json").write_text(text, encoding="utf-8")
    (directory / "exp.yaml").write_text(bad.experiment, encoding="utf-8")
    (directory / "model_def.py").write_text(MODEL_DEF, encoding="utf-8")
    return directory / "exp.yaml", directory


def message(bad: BadConfig, directory: Path) -> str:
    """Return what the check says about one bad config, without the directory's name."""
    path, context_dir = write(bad, directory)
    slots = bad.slots if bad.experiment is EXPERIMENT else None
    try:
        load_experiment(path, context_dir, slots=slots)
    except ConfigError as error:
        return str(error).replace(f"{directory}/", "").replace(str(directory), ".")
    return ""
