"""Keys of ``data.dstrial``, ``integrations`` and ``profiling``, and their errors."""

import pytest

from dstrial.config.experiment_config.dstrial_section import (
    Elasticity,
    TrainingChecks,
    elasticity_of,
    may_install,
)
from dstrial.errors import ConfigError


def section(**values):
    return f"data: {{dstrial: {values}}}\n".replace("True", "true")


@pytest.fixture
def problems(load):
    """Return a function that lists the problems of an experiment with more YAML."""

    def problems(more, deepspeed=None):
        try:
            load(deepspeed=deepspeed, more=more)
        except ConfigError as error:
            return list(map(str, error.problems))
        return []

    return problems


@pytest.mark.parametrize(
    "key", ["background_saving", "determined_imports", "override_optimizer", "telemetry"]
)
def test_switch_takes_booleans_only(load, problems, key):
    for value in (True, False):
        more = f"data: {{dstrial: {{{key}: {str(value).lower()}}}}}\n"
        assert load(more=more).raw["data"]["dstrial"][key] is value
    (problem,) = problems(section(**{key: "sometimes"}))
    assert f'data.dstrial.{key} is "sometimes"; expected true or false' in problem


def test_training_checks_are_read(load):
    raw = load(more="data: {dstrial: {non_finite: warn}}\n").raw
    assert TrainingChecks.from_config(raw) == TrainingChecks("warn", 3)
    assert TrainingChecks.from_config(None) == TrainingChecks("fail", 3)


FOUR_SLOTS = "resources: {slots_per_trial: 4}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (section(non_finite="never"), 'non_finite is "never"; expected one of "fail", "warn", "ignore"'),
        (section(non_finite_patience=0), "non_finite_patience is 0; expected an integer of at least 1"),
        (section(non_finite_patience=True), "non_finite_patience is true"),
        (section(pipeline_stages=2.0), "pipeline_stages is 2.0; expected an integer of at least 1. Write 2, without"),
        (FOUR_SLOTS + section(min_slots=5), "min_slots is 5; expected at most 4, the slots_per_trial"),
        (FOUR_SLOTS + section(max_slots=3), "max_slots is 3; expected at least 4, the slots_per_trial"),
        (section(min_slots=0), "expected an integer of at least 1"),
        (section(max_slots=True), "expected an integer of at least 1"),
        (section(resize_period="10m"), "expected a number of seconds"),
        (section(resize_period=-1), "expected a number of seconds"),
        (section(requirements="/etc/passwd"), 'requirements is "/etc/passwd"; expected a path in the model definition'),
        (section(requirements="../a.txt"), 'requirements is "../a.txt"; expected a path in the model definition'),
        (section(requirements=3), "requirements is 3; expected a path in the model definition"),
        (section(requirements="a.txt"), 'data.dstrial.requirements is "a.txt", which is not there'),
        ("profiling: true\n", "profiling is true; expected a mapping"),
        ("profiling: {sampling: 5}\n", "profiling.sampling is not a key of profiling"),
    ],
)  # fmt: skip
def test_wrong_value_gives_single_problem(problems, more, message):
    (problem,) = problems(more)
    assert message in problem


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
def test_webhooks_are_named_by_id_or_name(problems, integrations, words):
    found = problems(f"integrations: {integrations}\n")
    assert len(found) == len(words)
    assert all(word in problem for problem, word in zip(found, words, strict=True))


def test_elasticity_is_read_with_defaults():
    assert elasticity_of({}, 4) == Elasticity(4, None, 4, 600.0)
    given = {"min_slots": 2, "max_slots": 8, "resize_period": 60}
    assert elasticity_of(given, 4) == Elasticity(4, 2, 8, 60.0)
    asked = [elasticity_of(one, 4).is_asked_for for one in ({}, {"min_slots": 1}, {"max_slots": 8})]
    assert asked == [False, True, True]


@pytest.mark.parametrize(
    ("script", "installs"),
    [
        ("sh -c 'pip install humanize && python train.py'", True),
        ("uv pip sync needs.txt", True),
        ("python setup.py develop", True),
        ("export FROM_HOOK=1", False),
        ("python train.py --pipeline install", False),
    ],
)
def test_may_install_recognises_package_installation(script, installs):
    assert may_install(script) is installs
