"""Defaults and checks that a master applies to a submitted config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.config.documents import read_yaml_text
from dstrial.config.experiment_config.submission import (
    MasterDefaults,
    Submission,
    check_submission,
    config_values,
    continued_config,
    read_override,
    search_section,
)
from dstrial.errors import ConfigError
from dstrial.master.scheduler.reconciler import compile_policies

DEFAULTS = MasterDefaults({"type": "shared_fs", "host_path": "/checkpoints"}, ("A=1",))
SEARCH = "entrypoint: x\nsearcher: {name: random, metric: l, max_trials: 3}\n"
GOOD = "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"


def check(tmp_path: Path, text: str, **options: Any) -> Submission:
    (tmp_path / "train.py").touch()
    return check_submission(text, context_dir=tmp_path, defaults=options.pop("defaults", DEFAULTS), **options)


def test_submitted_values_override_master_defaults(tmp_path: Path) -> None:
    text = GOOD + (
        "checkpoint_storage: {type: shared_fs, storage_path: mine, save_trial_latest: 9}\n"
        "environment: {environment_variables: [A=2, B=3]}\n"
        "log_policies: [{name: CUDA OOM, pattern: null}, {pattern: boom, action: cancel_retries}]\n"
    )

    config = check(tmp_path, text).config

    assert json.loads(json.dumps(config)) == config
    assert config["name"].startswith("Experiment (")
    assert config["reproducibility"]["experiment_seed"] > 0
    storage = config["checkpoint_storage"]
    assert (storage["host_path"], storage["storage_path"], storage["save_trial_latest"]) == (
        "/checkpoints",
        "mine",
        9,
    )
    assert config["environment"]["environment_variables"]["cpu"] == ["A=2", "B=3"]
    assert [policy["pattern"] for policy in config["log_policies"]] == [
        None, ".*uncorrectable ECC error encountered.*", "boom",
    ]  # fmt: skip


def test_too_many_slots_are_rejected_or_wait(tmp_path: Path) -> None:
    text = GOOD + "resources: {slots_per_trial: 4}\n"

    with pytest.raises(ConfigError, match=r"at most 2, the slots of this master\. request unfulfillable, "):
        check(tmp_path, text, num_slots=2)
    patient = MasterDefaults(DEFAULTS.checkpoint_storage, launch_error=False)
    assert check(tmp_path, text, num_slots=2, defaults=patient).exceeds_slots


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("searcher: {name: single, metric: loss}\n", "entrypoint is not given"),
        (
            "entrypoint: x\nsearcher: {name: adaptive_asha, metric: l, max_trials: 2, max_length: {batches: 5}}\n",
            "requires `max_time` and `time_metric`",
        ),
        (
            GOOD + "environment: {environment_variables: [DET_MASTER=x]}\n",
            "a name that the master sets itself",
        ),
        (GOOD + "labels: [1]\n", "expected a string"),
        (
            GOOD + "hyperparameters: {deepspeed_config: {zero_optimisation: {}}}\n",
            "Write zero_optimization instead",
        ),
        (GOOD + "workspace: mine\n", "project is not given; expected a name"),
        (GOOD + "log_policies: [boom]\n", "a mapping with pattern"),
        (
            "entrypoint: x\nsearcher: {name: grid, metric: l}\n"
            "hyperparameters: {lr: {type: double, minval: 0, maxval: 1}}\n",
            "Add count",
        ),
        (SEARCH + "hyperparameters: {lr: {type: double, minval: 0, maxval: .inf}}\n", "a finite number"),
        (SEARCH + "hyperparameters: {n: {type: int, minval: 0, maxval: 9223372036854775808}}\n", "64 bits"),
        (
            SEARCH + "hyperparameters: {lr: {type: log, base: 10, minval: 1, maxval: 1000}}\n",
            "hyperparameters.lr.maxval is 1000, and 10 to the power of it is too large",
        ),
        (SEARCH.replace("3}", "1000001}"), "of at most 1000000"),
        (SEARCH.replace("3}", "20000, max_concurrent_trials: 0}"), "20000 trials begin at once"),
        (
            "entrypoint: x\nsearcher: {name: grid, metric: l, max_concurrent_trials: 0}\nhyperparameters:\n"
            "  a: {type: int, minval: 0, maxval: 999, count: 1000}\n  b: {c: {type: categorical, vals: [1, 2]}}\n"
            "  d: {type: double, minval: 0, maxval: 1, count: 11}\n",
            "22000 trials begin at once",
        ),
        (
            "entrypoint: x\nsearcher: {name: adaptive_asha, metric: l, mode: aggressive, max_trials: 20000, "
            "max_concurrent_trials: 0, max_time: 9, time_metric: batches}\n",
            "20000 trials begin at once",
        ),
        (
            "entrypoint: x\nsearcher: {name: adaptive_asha, metric: l, max_trials: 9, max_time: 9, "
            "time_metric: batches, bracket_rungs: [2, 0]}\n",
            "searcher.bracket_rungs[1] is 0",
        ),
    ],
)
def test_invalid_submission_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(tmp_path, text)

    assert message in str(raised.value)


def test_continued_config_applies_override(tmp_path: Path) -> None:
    base = (
        GOOD
        + "hyperparameters: {a: {type: int, minval: 1, maxval: 9}, b: 2}\nresources: {slots_per_trial: 2}\n"
    )

    active = check(tmp_path, base).config

    merged = continued_config(active, read_override("hyperparameters: {a: 5}\nmax_restarts: 1\n"))
    config = check(tmp_path, merged).config

    assert config["hyperparameters"]["a"] == {"type": "const", "val": 5}
    assert config["hyperparameters"]["b"] == {"type": "const", "val": 2}
    assert (config["max_restarts"], config["resources"]["slots_per_trial"]) == (1, 2)
    with pytest.raises(ConfigError, match="Create a new experiment"):
        continued_config(active, {"searcher": {"name": "random"}})


@pytest.mark.parametrize("is_detached", [True, False])
def test_null_searcher_name_is_rejected(tmp_path: Path, is_detached: bool) -> None:
    text = GOOD.replace("name: single", "name: null")
    with pytest.raises(ConfigError, match=r"searcher\.name is not given"):
        check(tmp_path, text, is_detached=is_detached)


def test_preview_needs_no_entrypoint_and_rejects_huge_grids() -> None:
    section = search_section({"searcher": {"name": "random", "metric": "l", "max_trials": 3}})
    assert section["searcher"]["max_trials"] == 3
    axes = {f"k{axis}": {"type": "int", "minval": 0, "maxval": 9, "count": 10} for axis in range(10)}
    with pytest.raises(ConfigError, match="a grid of more than 1000000000 points"):
        search_section({"searcher": {"name": "grid", "metric": "l"}, "hyperparameters": axes})


@pytest.mark.parametrize(
    ("source", "is_left"),
    [
        ("a = " + "1+" * 100_000 + "1\n", True),  # too deeply nested and too large to be parsed
        ("a = 1\n" * 200_000, True),
        ("(" * 5000, False),
        ("a = '\0'\n", False),
    ],
    ids=["deep", "large", "brackets", "nul"],
)
def test_hostile_source_is_rejected_or_left_unparsed(tmp_path: Path, source: str, is_left: bool) -> None:
    (tmp_path / "model_def.py").write_text(source)
    text = GOOD.replace("python3 train.py", "model_def:Trial")
    if is_left:
        assert check(tmp_path, text).config["entrypoint"] == "model_def:Trial"
    else:
        with pytest.raises(ConfigError, match="is not Python"):
            check(tmp_path, text)


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


def submit(tmp_path: Path, template: dict[str, Any] | None = None, **given: Any) -> Submission:
    return check(tmp_path, GOOD + yaml.safe_dump(given), template=template)


def test_submission_may_have_slots_of_commands(tmp_path: Path) -> None:
    both = {"slots": 3, "slots_per_trial": 2}

    submission = submit(tmp_path, resources=both)
    assert submission.config["resources"]["slots"] == 3
    assert submission.config["resources"]["slots_per_trial"] == 2
    assert "slots" not in check(tmp_path, GOOD).config["resources"]
    assert submission.warnings == ()


def test_gpu_beside_cuda_and_unknown_devices_are_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        submit(
            tmp_path,
            environment={"environment_variables": {"gpu": ["A=1"], "cuda": ["A=2"]}, "image": {"tpu": "x"}},
        )
    text = str(caught.value)
    assert "environment.environment_variables.gpu is given with cuda; expected one of the two" in text
    assert "environment.image.tpu is not a kind of device; expected cpu, cuda (or gpu) or rocm" in text


def test_policy_without_pattern_disables_template_policy(tmp_path: Path) -> None:
    policies = [{"name": "CUDA OOM"}, {"name": "mine", "pattern": "x"}]
    over_template = submit(tmp_path, {"log_policies": policies}, log_policies=[{"name": "mine"}])
    found = over_template.config["log_policies"]
    assert [policy["name"] for policy in found if policy["pattern"]] == ["ECC Error"]


@pytest.mark.parametrize("off", [{}, {"pattern": None}], ids=["named", "null"])
def test_resubmitted_disabled_log_policies_stay_disabled(tmp_path: Path, off: dict[str, Any]) -> None:
    both = [{"name": "CUDA OOM", **off}, {"name": "ECC Error", **off}]

    shown = submit(tmp_path, log_policies=both).config["log_policies"]

    assert compile_policies({"log_policies": shown}) == ()
    assert submit(tmp_path, log_policies=shown).config["log_policies"] == shown


def test_policy_with_new_action_keeps_default_pattern(tmp_path: Path) -> None:
    found = submit(tmp_path, log_policies=[{"name": "CUDA OOM", "action": "cancel_retries"}]).config[
        "log_policies"
    ]
    assert found[0] == {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": "cancel_retries"}
