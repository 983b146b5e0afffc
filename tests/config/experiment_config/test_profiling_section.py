"""What is wrong with ``profiling`` is said in the same words by ``dstrial check`` and when a master is given the config."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_configs import EXPERIMENT, BadConfig, write

from dstrial.config import load_experiment
from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.errors import ConfigError, ConfigProblem

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


def problems_of_a_check(text: str, tmp_path: Path) -> tuple[ConfigProblem, ...]:
    path, context_dir = write(BadConfig("none", (), None, EXPERIMENT + text + "\n"), tmp_path)
    with pytest.raises(ConfigError) as found:
        load_experiment(path, context_dir)
    return tuple(found.value.problems)


def problems_of_a_submission(text: str, tmp_path: Path) -> tuple[ConfigProblem, ...]:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError) as found:
        check_submission(
            SUBMITTED + text + "\n",
            context_dir=tmp_path,
            defaults=MasterDefaults({"type": "shared_fs", "host_path": "/checkpoints"}),
        )
    return tuple(found.value.problems)


@pytest.mark.parametrize("problems_of", [problems_of_a_check, problems_of_a_submission])
@pytest.mark.parametrize(("text", "where", "got", "expected"), WRONG)
def test_it_is_one_problem_with_place_and_remedy(
    problems_of, text: str, where: str, got: str, expected: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(text, tmp_path)
    assert problem.where.endswith(f": {where}")
    assert got in problem.got
    assert problem.expected == expected
    assert problem.fix.endswith(".")


def test_what_has_no_effect_is_named(tmp_path: Path) -> None:
    text = "profiling: {enabled: true, begin_on_batch: 2, end_after_batch: 9, sync_timings: false}\n"
    path, context_dir = write(BadConfig("none", (), None, EXPERIMENT + text), tmp_path)

    config = load_experiment(path, context_dir)
    assert config.profiling_enabled
    ignored = [line for line in config.warnings if "profiling" in line]
    assert len(ignored) == 3
    assert all("has no effect" in line for line in ignored)
    usual = EXPERIMENT + "profiling: {enabled: true, begin_on_batch: 0, sync_timings: true}\n"
    path, context_dir = write(BadConfig("none", (), None, usual), tmp_path)
    assert not [line for line in load_experiment(path, context_dir).warnings if "profiling" in line]
