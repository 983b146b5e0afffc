"""What is wrong with ``profiling`` is said in the same words by ``dstrial check`` and when a master is given the config."""

import pytest

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.errors import ConfigError

DEFAULTS = MasterDefaults({"type": "shared_fs", "host_path": "/checkpoints"})
SUBMITTED = "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"
WRONG = [
    ("profiling: true", "profiling", "true", "a mapping"),
    ("profiling: {enabled: maybe}", "profiling.enabled", '"maybe"', "true or false"),
    ("profiling: {sampling: 5}", "profiling.sampling", "not a key of profiling", "one of its keys"),
    ("profiling: {begin_on_batch: -1}", "profiling.begin_on_batch", "-1", "an integer of at least 0"),
    ("profiling: {end_after_batch: '9'}", "profiling.end_after_batch", '"9"', "an integer of at least 0"),
    ("profiling: {sync_timings: 1}", "profiling.sync_timings", "1", "true or false"),
    (
        "profiling: {begin_on_batch: 5, end_after_batch: 3}",
        "profiling.begin_on_batch",
        "5",
        "at most end_after_batch (3)",
    ),
]


@pytest.mark.parametrize("is_submitted", [False, True])
@pytest.mark.parametrize(("text", "where", "got", "expected"), WRONG)
def test_wrong_profiling_is_one_problem(load, is_submitted, text, where, got, expected, tmp_path):
    with pytest.raises(ConfigError) as found:
        if is_submitted:
            (tmp_path / "train.py").touch()
            check_submission(SUBMITTED + text, context_dir=tmp_path, defaults=DEFAULTS)
        else:
            load(more=text)
    (problem,) = found.value.problems
    assert problem.where.endswith(f": {where}")
    assert got in problem.got
    assert problem.expected == expected
    assert problem.fix.endswith(".")


def test_profiling_keys_without_effect_are_warned_of(load):
    config = load(
        more="profiling: {enabled: true, begin_on_batch: 2, end_after_batch: 9, sync_timings: false}\n"
    )
    assert config.profiling_enabled
    ignored = [line for line in config.warnings if "profiling" in line]
    assert len(ignored) == 3
    assert all("has no effect" in line for line in ignored)
    usual = load(more="profiling: {enabled: true, begin_on_batch: 0, sync_timings: true}\n")
    assert not [line for line in usual.warnings if "profiling" in line]
