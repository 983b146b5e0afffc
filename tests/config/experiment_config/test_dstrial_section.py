"""Keys of ``data.dstrial`` and of ``integrations``: those that are read, and messages about wrong values."""

import pytest

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.errors import ConfigError


@pytest.mark.parametrize(
    "key", ["background_saving", "determined_imports", "override_optimizer", "telemetry"]
)
def test_switch_takes_booleans_only(load, key):
    for value in (True, False):
        more = f"data: {{dstrial: {{{key}: {str(value).lower()}}}}}\n"
        assert load(more=more).raw["data"]["dstrial"][key] is value
    with pytest.raises(ConfigError, match=rf"data\.dstrial\.{key} is .*; expected true or false"):
        load(more=f"data: {{dstrial: {{{key}: sometimes}}}}\n")


def test_training_checks_are_read_and_explained(load, tmp_path, capsys):
    from dstrial.cli.app import main

    raw = load(more="data: {dstrial: {non_finite: warn}}\n").raw
    assert TrainingChecks.from_config(raw) == TrainingChecks("warn", 3)
    assert TrainingChecks.from_config(None) == TrainingChecks("fail", 3)

    path = str(tmp_path / "exp.yaml")
    assert main(["check", path, str(tmp_path), "--explain"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["data.dstrial.non_finite", '"warn"', path] in printed
    assert ["data.dstrial.non_finite_patience", "3", "dstrial's", "default"] in printed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("non_finite: never", r'non_finite is "never"; expected one of "fail", "warn", "ignore"'),
        ("non_finite_patience: 0", r"non_finite_patience is 0; expected an integer of at least 1"),
        ("non_finite_patience: true", r"non_finite_patience is true"),
    ],
)
def test_wrong_training_check_is_refused(load, values, message):
    with pytest.raises(ConfigError, match=rf"data\.dstrial\.{message}"):
        load(more=f"data: {{dstrial: {{{values}}}}}\n")


@pytest.mark.parametrize(
    ("integrations", "words"),
    [
        ("null", []),
        ("{pachyderm: {dataset: {branch: x}}}", []),
        ("{webhooks: null}", []),
        ("{webhooks: {webhook_id: [1, 2], webhook_name: [a], exclude: true}}", []),
        ("{webhooks: {webhook_id: null, exclude: null}}", []),
        ("[a]", ["integrations is"]),
        ("{webhooks: [a]}", ["integrations.webhooks is"]),
        (
            "{webhooks: {webhook_id: 1, webhook_name: a, exclude: 2, webhook: x}}",
            ["webhook_id is 1", "webhook_name is", "exclude is 2", "webhooks.webhook is"],
        ),
        ("{webhooks: {webhook_id: [true], webhook_name: [1]}}", ["webhook_id[0] is", "webhook_name[0] is"]),
    ],
)
def test_webhooks_are_named_by_number_and_by_name(load, integrations, words):
    found = []
    try:
        load(more=f"integrations: {integrations}\n")
    except ConfigError as error:
        found = error.problems
    assert len(found) == len(words)
    assert all(word in str(problem) for problem, word in zip(found, words, strict=True))


@pytest.mark.parametrize("key", ["min_slots", "pipeline_stages"])
def test_size_with_a_decimal_point_is_refused(load, key):
    with pytest.raises(
        ConfigError, match=rf"data\.dstrial\.{key} is 2\.0; .* Write 2, without a decimal point"
    ):
        load(more=f"data: {{dstrial: {{{key}: 2.0}}}}\n")
