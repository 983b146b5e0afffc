"""Origins of config values: a line, the template, or a default."""

from __future__ import annotations

import json
from pathlib import Path

from dstrial.config.documents import read_yaml_text
from dstrial.config.experiment_config.origins import (
    checked_again,
    config_values,
    explained_rows,
)
from dstrial.config.secrets import MASK, SecretNames

TEXT = """\
name: one
entrypoint: python3 train.py
searcher: {name: single, metric: loss, max_length: {batches: 5}}
hyperparameters:
  deepspeed_config: ds.json
  lr: 0.1
"""


def test_value_origin_is_line_template_or_default() -> None:
    effective = {
        "name": "one",
        "hyperparameters": {"lr": {"type": "const", "val": 0.1}},
        "max_restarts": 2,
        "debug": False,
        "labels": [],
    }
    found = config_values(effective, read_yaml_text(TEXT, "experiment config"), {"max_restarts": 2})
    assert {one.key: one.origin for one in found} == {
        "name": "experiment config:1",
        "hyperparameters.lr.type": "experiment config:6",
        "hyperparameters.lr.val": "experiment config:6",
        "max_restarts": "template",
        "debug": "default",
        "labels": "default",
    }


def test_explained_deepspeed_config_masks_secrets(tmp_path: Path) -> None:
    settings = {"train_batch_size": 8, "comet": {"enabled": True, "api_key": "very-secret"}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (tmp_path / "train.py").write_text("")
    config = checked_again(TEXT, {"resources": {"slots_per_trial": 2}}, tmp_path, has_files=True)
    ((name, (source, checked)),) = config.engines.items()
    rows = {row.key: (row.value, row.origin) for row in explained_rows(source, checked, SecretNames())}
    assert name == "deepspeed_config"
    assert rows["comet.api_key"][0] == json.dumps(MASK)
    assert rows["train_micro_batch_size_per_gpu"] == ("4", "solved")
