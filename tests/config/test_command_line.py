from __future__ import annotations

import pytest

from dstrial.config.command_line import CommandLine


def line(text: str) -> CommandLine:
    return CommandLine.of(text.split())


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        *(
            (f"train --bf16 --learning{dash}rate{join}0.1 --seed 1", "learning_rate", "0.1")
            for dash in "_-"
            for join in " ="
        ),
        ("--seed 1 --max_steps 5 --max-steps=7", "max_steps", "7"),
        ("--a -- --seed 3", "seed", None),
        ("--max_steps -1 --seed 1", "max_steps", "-1"),
        ("--deepspeed --seed 1", "deepspeed", None),
    ],
)
def test_last_flag_value_is_found_in_every_spelling(words: str, name: str, value: str | None) -> None:
    assert line(words).value(name) == value


@pytest.mark.parametrize(
    ("words", "name", "value", "changed"),
    [
        ("--seed 1 --max_steps 5 --max-steps=7", "max_steps", "9", "--seed 1 --max_steps 5 --max-steps=9"),
        ("--a 1 --learning-rate 5", "learning_rate", "6", "--a 1 --learning-rate 6"),
        ("--a 1 -- file", "seed", "2", "--a 1 --seed 2 -- file"),  # before positional arguments
        ("--bf16 --fp16", "bf16", "False", "--bf16 False --fp16"),
        ("--a 1 --warmup_ratio 0.1 --b --warmup-ratio=0.2", "warmup_ratio", None, "--a 1 --b"),
    ],
)
def test_flag_is_changed_in_its_spelling_or_removed(
    words: str, name: str, value: str | None, changed: str
) -> None:
    given = line(words)
    assert (given.without(name) if value is None else given.with_value(name, value)) == line(changed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--bf16", True),
        ("--bf16 --fp16", True),
        ("--bf16 yes", True),
        ("--bf16=0", False),
        ("--bf16 False", False),
        ("--other", None),
        ("--bf16 perhaps", None),
    ],
)
def test_boolean_flag_value_is_optional(words: str, expected: bool | None) -> None:
    assert line(words).truth("bf16") is expected
