"""The JSON Schema of the experiment config, and generated reference pages."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from dstrial.cli.app import main
from dstrial.config.documents import read_yaml
from dstrial.config.schema import experiment_schema

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*ROOT.glob("experiment_configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")])
VALIDATOR = jsonschema.Draft202012Validator(experiment_schema())
GOOD = {"name": "t", "entrypoint": "m:T", "searcher": {"name": "single", "metric": "loss"}}


def test_experiment_schema_is_valid_json_schema():
    jsonschema.Draft202012Validator.check_schema(experiment_schema())
    VALIDATOR.validate(GOOD)


def test_check_schema_option_prints_schema(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "--schema"])

    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(experiment_schema()))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_schema_accepts_shipped_config(path):
    VALIDATOR.validate(read_yaml(path, path.name).value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sercher": {}},
        {"searcher": {"metrc": "loss"}},
        {"max_restarts": -1},
        {"checkpoint_policy": "last"},
        {"labels": [1]},
        {"min_validation_period": {"steps": 3}},
        {"data": {"dstrial": {"pipeline_stage": 2}}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_schema_rejects_wrong_config(wrong):
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({**GOOD, **wrong})


@pytest.mark.parametrize("name", ["experiment-config", "master-settings", "command-line", "parallel-axes"])
def test_reference_page_is_up_to_date(name, monkeypatch):
    if name == "command-line" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse of other Pythons prints help otherwise")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("reference_pages", None)
    import reference_pages

    assert (reference_pages.FOLDER / f"{name}.md").read_text() == reference_pages.PAGES[f"{name}.md"]()
