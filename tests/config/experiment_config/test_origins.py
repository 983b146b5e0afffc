"""Origins of config values: a line, the template, or a default."""

from __future__ import annotations

from dstrial.config.documents import read_yaml_text
from dstrial.config.experiment_config.origins import config_values

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
