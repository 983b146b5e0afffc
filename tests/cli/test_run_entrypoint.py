from __future__ import annotations

from collections.abc import Sequence

import pytest

from dstrial.cli.run_entrypoint import Entrypoint, parse_entrypoint
from dstrial.errors import ConfigError


@pytest.mark.parametrize(
    "entrypoint",
    [
        "model_def:MyTrial",
        ["model_def:MyTrial"],
        "python3 -m dstrial.launch --trial model_def:MyTrial",
        "python3 -m dstrial.launch --slots 4 --config=x.yaml --trial=model_def:MyTrial",
        "python -u -m dstrial.launch --trial model_def:MyTrial",
        "python3 -m determined.launch.deepspeed --trial model_def:MyTrial",
        ["python3", "-m", "dstrial.launch", "--trial", "model_def:MyTrial"],
    ],
)
def test_every_form_that_names_a_trial_is_that_trial(entrypoint: str | Sequence[str]) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml") == Entrypoint("model_def:MyTrial")


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("python3 train.py --lr 0.1", ("python3", "train.py", "--lr", "0.1")),
        ("python3 train.py --trial a:B", ("python3", "train.py", "--trial", "a:B")),
        ("python3 -m dstrial.launch --slots 2 train.py --lr 0.1", ("train.py", "--lr", "0.1")),
        ("python3 -m dstrial.launch -- train.py", ("train.py",)),
        ("python3 -m determined.launch.torch_distributed python3 train.py", ("python3", "train.py")),
        (
            "python3 -m determined.launch.torch_distributed --max_restarts 3 -- python3 'my train.py'",
            ("python3", "my train.py"),
        ),
        ("A=1 python3 train.py && echo $A", ("sh", "-c", "A=1 python3 train.py && echo $A")),
        (["python3", "train.py", "a && b"], ("python3", "train.py", "a && b")),
    ],
)
def test_of_a_command_the_part_that_each_rank_runs_remains(
    entrypoint: str | Sequence[str], words: tuple[str, ...]
) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml") == Entrypoint(None, words)


@pytest.mark.parametrize(
    "entrypoint", ["torchrun --nproc-per-node 2 train.py", "/usr/bin/deepspeed train.py"]
)
def test_a_foreign_launcher_is_started_once(entrypoint: str) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml").starts_ranks


@pytest.mark.parametrize(
    "entrypoint",
    [
        None,
        "",
        [],
        "python3 'train.py",
        "python3 -m dstrial.launch",
        "python3 -m dstrial.launch --slots 2",
        "python3 -m dstrial.launch --trial MyTrial",
        "cd x && python3 -m dstrial.launch --trial model_def:MyTrial",
    ],
)
def test_an_entrypoint_that_cannot_be_run_is_named_with_its_config(
    entrypoint: str | Sequence[str] | None,
) -> None:
    with pytest.raises(
        ConfigError, match=r"exp\.yaml: entrypoint is .*; expected module:Class, or a command\. "
    ):
        parse_entrypoint(entrypoint, "exp.yaml")
