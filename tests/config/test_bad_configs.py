import re

import pytest
from bad_configs import BAD_CONFIGS, EXPERIMENT, BadConfig, message
from deepspeed_release import needs_0_19_8


@needs_0_19_8  # other releases get a warning for an unknown key
@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=[bad.mistake for bad in BAD_CONFIGS])
def test_bad_config_message_has_place_expectation_and_fix(bad, tmp_path):
    text = message(bad, tmp_path)

    assert text, "the check found nothing"
    for fragment in bad.fragments:
        assert fragment in text
    for line in text.splitlines():
        assert re.fullmatch(r"(exp\.yaml|ds\.json):\d+: .+; expected .+\. .+\.", line), line


def test_base_config_has_no_warnings(load):
    config = load()

    assert config.warnings == ()
    assert config.deepspeed_check.batch.train_batch_size == 4


def test_problems_of_both_files_are_reported_together(tmp_path):
    bad = BadConfig(
        "three mistakes",
        (),
        {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2, "zero_optimisation": {"stage": 1}},
        EXPERIMENT.replace("name: test", "max_restarts: -1"),
    )
    places = [line.split(" is ")[0] for line in message(bad, tmp_path).splitlines()]

    assert places == [
        "exp.yaml:1: max_restarts",
        "ds.json:4: zero_optimisation",
        "ds.json:2: train_batch_size",
    ]
