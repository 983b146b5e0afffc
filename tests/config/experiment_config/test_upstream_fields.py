"""Fields that Determined accepts: command slots, ``gpu``, log policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.config.experiment_config.command import check_command
from dstrial.config.experiment_config.submission import NO_IMAGE, MasterDefaults, Submission, check_submission
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


def test_slots_and_slots_per_trial_may_coexist(tmp_path: Path) -> None:
    both = {"slots": 3, "slots_per_trial": 2}

    submission = submit(tmp_path, resources=both)
    assert submission.config["resources"]["slots"] == 3
    assert submission.config["resources"]["slots_per_trial"] == 2
    assert "slots" not in submit(tmp_path).config["resources"]
    assert submission.warnings == ()

    command = check_command({"entrypoint": "true", "resources": both}, "COMMAND", num_slots=4)
    assert command.num_slots == 3
    assert command.config["resources"]["slots_per_trial"] == 2
    alone = check_command(
        {"entrypoint": "true"}, "COMMAND", num_slots=4, template={"resources": {"slots_per_trial": 2}}
    )
    assert alone.num_slots == 1


@pytest.mark.parametrize("null_gpu", [{}, {"gpu": None}])
def test_gpu_is_alias_of_cuda_in_command_config(null_gpu: dict[str, None]) -> None:
    given = {"image": {"cuda": "above"}, "environment_variables": {"cuda": ["A=1"], **null_gpu}}
    template = {
        "image": {"gpu": "below", "cpu": "c"},
        "environment_variables": {"gpu": ["A=0"], "cpu": ["B=2"]},
    }
    environment = check_command(
        {"entrypoint": "true", "environment": given},
        "COMMAND",
        num_slots=1,
        environment_variables=("M=0",),
        template={"environment": template},
    ).config["environment"]
    assert environment["image"] == {"cpu": "c", "cuda": "above", "rocm": NO_IMAGE}
    variables = {"cpu": ["M=0", "B=2"], "cuda": ["M=0", "A=1"], "rocm": ["M=0"]}
    assert environment["environment_variables"] == variables


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
