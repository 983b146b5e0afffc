"""Fields that Determined accepts and completes: slots of commands, ``gpu``, policies that are only named, defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.config.experiment_config.command import check_command
from dstrial.config.experiment_config.submission import NO_IMAGE, MasterDefaults, Submission, check_submission
from dstrial.config.merge import merge_template
from dstrial.errors import ConfigError
from dstrial.master.scheduler.reconciler import compile_policies

GOOD: dict[str, Any] = {
    "name": "t",
    "entrypoint": "true",
    "searcher": {"name": "single", "metric": "loss"},
}


def submit(tmp_path: Path, template: dict[str, Any] | None = None, **given: Any) -> Submission:
    defaults = MasterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/checkpoints"})
    return check_submission(
        yaml.safe_dump({**GOOD, **given}), context_dir=tmp_path, defaults=defaults, template=template
    )


def test_slots_of_a_command_beside_those_of_a_trial_are_accepted_in_both_configs(tmp_path: Path) -> None:
    both = {"slots": 3, "slots_per_trial": 2}

    submission = submit(tmp_path, resources=both)
    assert submission.config["resources"]["slots"] == 3
    assert submission.config["resources"]["slots_per_trial"] == 2
    assert "slots" not in submit(tmp_path).config["resources"]
    assert submission.warnings == ()
    (warning,) = submit(tmp_path, resources={"slots": 3}).warnings
    assert "resources.slots has no effect in an experiment" in warning

    command = check_command({"entrypoint": "true", "resources": both}, "COMMAND", num_slots=4)
    assert command.num_slots == 3
    assert command.config["resources"]["slots_per_trial"] == 2
    alone = check_command(
        {"entrypoint": "true"}, "COMMAND", num_slots=4, template={"resources": {"slots_per_trial": 2}}
    )
    assert alone.num_slots == 1


@pytest.mark.parametrize("is_command", [False, True])
def test_gpu_means_cuda_and_the_images_left_out_are_completed(tmp_path: Path, is_command: bool) -> None:
    environment = {"image": {"gpu": "theirs"}, "environment_variables": {"gpu": ["A=1"], "cpu": ["B=2"]}}
    if is_command:
        given = {"entrypoint": "true", "environment": environment}
        config = check_command(given, "COMMAND", num_slots=1, environment_variables=("M=0",)).config
    else:
        config = submit(tmp_path, environment=environment).config

    master = ["M=0"] if is_command else []
    assert config["environment"]["image"] == {"cpu": NO_IMAGE, "cuda": "theirs", "rocm": NO_IMAGE}
    assert config["environment"]["environment_variables"] == {
        "cpu": [*master, "B=2"],
        "cuda": [*master, "A=1"],
        "rocm": master,
    }


def test_gpu_and_cuda_of_different_layers_are_the_same_device(tmp_path: Path) -> None:
    template = {
        "environment": {"image": {"gpu": "below", "cpu": "c"}, "environment_variables": {"gpu": ["A=0"]}}
    }
    config = {"environment": {"image": {"cuda": "above"}, "environment_variables": {"cuda": ["A=1"]}}}
    merged = merge_template(template, config)["environment"]
    assert merged["image"] == {"cpu": "c", "cuda": "above"}
    assert merged["environment_variables"]["cuda"] == ["A=0", "A=1"]


def test_null_gpu_beside_cuda_keeps_variables_of_master() -> None:
    variables = {"gpu": None, "cuda": ["A=1"]}
    given = {"entrypoint": "true", "environment": {"environment_variables": variables}}
    config = check_command(given, "COMMAND", num_slots=1, environment_variables=("M=0",)).config

    assert config["environment"]["environment_variables"] == {
        "cpu": ["M=0"],
        "cuda": ["M=0", "A=1"],
        "rocm": ["M=0"],
    }


def test_gpu_beside_cuda_and_unknown_devices_are_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        submit(
            tmp_path,
            environment={"environment_variables": {"gpu": ["A=1"], "cuda": ["A=2"]}, "image": {"tpu": "x"}},
        )
    text = str(caught.value)
    assert "environment.environment_variables.gpu is given with cuda; expected one of the two" in text
    assert "environment.image.tpu is not a kind of device; expected cpu, cuda (or gpu) or rocm" in text


def test_a_policy_that_is_only_named_is_switched_off(tmp_path: Path) -> None:
    policies = [{"name": "CUDA OOM"}, {"name": "mine", "pattern": "x"}]
    found = submit(tmp_path, log_policies=policies).config["log_policies"]
    assert {policy["name"]: policy["pattern"] for policy in found} == {
        "CUDA OOM": None,
        "ECC Error": ".*uncorrectable ECC error encountered.*",
        "mine": "x",
    }

    over_template = submit(tmp_path, {"log_policies": policies}, log_policies=[{"name": "mine"}])
    found = over_template.config["log_policies"]
    assert [policy["name"] for policy in found if policy["pattern"]] == ["ECC Error"]


@pytest.mark.parametrize("off", [{}, {"pattern": None}], ids=["named", "null"])
def test_shown_log_policies_submitted_again_stay_off(tmp_path: Path, off: dict[str, Any]) -> None:
    both = [{"name": "CUDA OOM", **off}, {"name": "ECC Error", **off}]

    shown = submit(tmp_path, log_policies=both).config["log_policies"]

    assert compile_policies({"log_policies": shown}) == ()
    assert submit(tmp_path, log_policies=shown).config["log_policies"] == shown


def test_a_policy_that_changes_the_action_only_keeps_its_pattern(tmp_path: Path) -> None:
    found = submit(tmp_path, log_policies=[{"name": "CUDA OOM", "action": "cancel_retries"}]).config[
        "log_policies"
    ]
    assert found[0] == {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": "cancel_retries"}


@pytest.mark.parametrize("size", [4, "1.5 gb", "1", "1219021 b", ".5T", "4GiB"])
def test_memory_size_is_accepted(tmp_path: Path, size: Any) -> None:
    assert submit(tmp_path, resources={"shm_size": size}).config["resources"]["shm_size"] == size


@pytest.mark.parametrize("size", ["giga", "1.gb", "1 gi", "1 i", "", "-1", "1 gb "])
def test_shm_size_not_a_memory_size_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match=r"resources\.shm_size is .*; expected a memory size"):
        submit(tmp_path, resources={"shm_size": size})
    with pytest.raises(ConfigError, match=r"resources\.shm_size is .*; expected a memory size"):
        check_command({"entrypoint": "true", "resources": {"shm_size": size}}, "COMMAND", num_slots=1)


def test_preemption_timeout_is_null_unless_given(tmp_path: Path) -> None:
    assert submit(tmp_path).config["preemption_timeout"] is None
    assert submit(tmp_path, preemption_timeout=7).config["preemption_timeout"] == 7
