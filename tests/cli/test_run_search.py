from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrial.cli.run_search import best_trial, progress_line, trial_table
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.master.store.views.observe import ExperimentView, TrialView

CONFIG = """
name: search
entrypoint: ls
searcher: {name: random, max_trials: 3, metric: loss, smaller_is_better: true}
hyperparameters:
  lr: {type: log, base: 10, minval: -3, maxval: -1}
  width: 8
  nested: {depth: {type: int, minval: 1, maxval: 4}, fixed: {type: const, val: 1}}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentConfig:
    (tmp_path / "exp.yaml").write_text(CONFIG)
    return load_experiment(tmp_path / "exp.yaml", tmp_path, require_concrete=False)


def trial(number: int, state: str, metric: float | None) -> TrialView:
    hparams = {"lr": 0.00123456, "width": 8, "nested": {"depth": number, "fixed": 1}}
    return TrialView(number, state, json.dumps(hparams), 10 * number, 0, metric, False, None, None, 1, None)


VIEW = ExperimentView(
    7, "ACTIVE", 0.4, None, (trial(1, "COMPLETED", 0.5), trial(2, "ACTIVE", 0.25), trial(3, "ACTIVE", None))
)


def test_the_best_trial_is_that_with_the_best_metric() -> None:
    best = best_trial(VIEW, smaller_is_better=True)
    assert best is not None
    assert best.id == 2
    worst = best_trial(VIEW, smaller_is_better=False)
    assert worst is not None
    assert worst.id == 1
    assert best_trial(ExperimentView(7, "ACTIVE", 0.0, None, ()), smaller_is_better=True) is None


def test_one_line_tells_how_far_a_search_is() -> None:
    assert (
        progress_line(VIEW, "loss", smaller_is_better=True)
        == "40 %  2 active, 1 completed  loss 0.25 (trial 2)"
    )


def test_the_table_has_the_best_trial_first_and_only_what_the_search_chose(
    experiment: ExperimentConfig,
) -> None:
    assert trial_table(VIEW, experiment) == [
        "trial  state      batches  loss  hyperparameters",
        "2      active     20       0.25  lr=0.001235 nested.depth=2",
        "1      completed  10       0.5   lr=0.001235 nested.depth=1",
        "3      active     30             lr=0.001235 nested.depth=3",
    ]
