"""Configs of commands: defaults, templates and rejected values."""

from __future__ import annotations

from typing import Any

import pytest

from dstrial.config.experiment_config.command import check_command, interpreter_of, seconds_of
from dstrial.config.experiment_config.submission import NO_IMAGE
from dstrial.errors import ConfigError


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("echo $A; ls", ("sh", "-c", "echo $A; ls")),
        (["echo $A; ls"], ("sh", "-c", "echo $A; ls")),
        (["python3", "a.py", "two words"], ("python3", "a.py", "two words")),
    ],
)
def test_single_word_entrypoint_is_shell_line(entrypoint: Any, words: tuple[str, ...]) -> None:
    assert check_command({"entrypoint": entrypoint}, "COMMAND", num_slots=1).words == words


def test_check_command_fills_in_defaults() -> None:
    command = check_command({"entrypoint": "true"}, "COMMAND", num_slots=1)
    tensorboard = check_command({}, "TENSORBOARD", num_slots=0)

    assert (command.num_slots, command.priority) == (1, 42)
    assert (tensorboard.num_slots, tensorboard.words) == (0, ())
    assert command.config["description"].startswith("Command (")
    assert tensorboard.config["description"].startswith("TensorBoard (")
    assert set(command.config["environment"]["image"]) == {"cpu", "cuda", "rocm"}


def test_template_slots_wait_without_launch_error() -> None:
    large = {"resources": {"slots": 100}}
    waits = check_command({"entrypoint": "x"}, "COMMAND", num_slots=1, template=large, launch_error=False)
    assert waits.num_slots == 100
    with pytest.raises(ConfigError, match="request unfulfillable"):
        check_command({"entrypoint": "x"}, "COMMAND", num_slots=1, template=large)
    for template in (None, large):
        with pytest.raises(ConfigError, match="request unfulfillable"):
            check_command(
                {"entrypoint": "x", **large}, "COMMAND", num_slots=1, template=template, launch_error=False
            )


def test_config_overrides_template_and_master_variables() -> None:
    template = {"resources": {"slots": 2, "priority": 7}, "searcher": {"name": "single"}, "labels": ["x"]}
    given = {
        "entrypoint": "true",
        "resources": {"slots": 0},
        "environment": {"environment_variables": ["A=own", "DET_PYTHON_EXECUTABLE=/a/python"]},
    }

    spec = check_command(
        given, "GENERIC", num_slots=1, environment_variables=("A=master",), template=template
    )

    assert (spec.num_slots, spec.priority) == (0, 7)
    variables = spec.config["environment"]["environment_variables"]
    assert variables["cpu"] == variables["cuda"] == ["A=own", "DET_PYTHON_EXECUTABLE=/a/python"]
    assert interpreter_of(spec.config) == interpreter_of(given) == "/a/python"
    assert "searcher" not in spec.config


def test_only_command_may_lack_entrypoint() -> None:
    assert check_command({}, "COMMAND", num_slots=2).words == ("sh", "-c", "true")
    with pytest.raises(ConfigError, match="entrypoint is not given"):
        check_command({}, "GENERIC", num_slots=2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"entrypoint": []}, "entrypoint is not given"),
        ({"entrypoint": [1]}, r"entrypoint is \[1\]"),
        ({"entrypoint": "x", "nonsense": 1}, "nonsense is not a key"),
        ({"entrypoint": "x", "idle_timeout": "3 hours"}, "idle_timeout is"),
        ({"entrypoint": "x", "work_dir": "relative"}, "work_dir is"),
        ({"entrypoint": "x", "tensorboard_args": [1]}, "tensorboard_args"),
        ({"entrypoint": "x", "resources": {"priority": 100}}, "priority is 100"),
        ({"entrypoint": "x", "resources": {"slots": 3}}, r"resources\.slots is 3; expected at most 1"),
        ({"entrypoint": "x", "environment": {"environment_variables": ["DET_MASTER=x"]}}, "DET_MASTER"),
        ({"entrypoint": "x", "environment": {"proxy_ports": [{"proxy_port": 0}]}}, "proxy_port is 0"),
    ],
)
def test_invalid_command_config_is_rejected(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_command(given, "COMMAND", num_slots=1)


@pytest.mark.parametrize(
    ("span", "seconds"),
    [("30m", 1800), ("1h30m", 5400), ("1.5s", 1.5), ("500ms", 0.5), (90, 90), ("", None), ("3", None), ("-1m", None),
     (True, None), (-1, None)],
)  # fmt: skip
def test_seconds_of_parses_go_durations(span: Any, seconds: float | None) -> None:
    assert seconds_of(span) == seconds


def test_slots_per_trial_does_not_set_command_slots() -> None:
    both = {"slots": 3, "slots_per_trial": 2}
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
