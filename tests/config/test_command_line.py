from __future__ import annotations

import pytest

from dstrial.config.command_line import CommandLine


def line(text: str) -> CommandLine:
    return CommandLine.of(text.split())


@pytest.mark.parametrize(
    "words",
    ["--learning_rate 0.1", "--learning-rate 0.1", "--learning_rate=0.1", "--learning-rate=0.1"],
)
def test_a_flag_is_found_in_every_spelling(words: str) -> None:
    assert line(f"train --bf16 {words} --seed 1").value("learning_rate") == "0.1"


def test_the_last_one_of_a_flag_counts_and_is_the_one_that_is_changed() -> None:
    given = line("--seed 1 --max_steps 5 --max-steps=7")

    assert given.value("max_steps") == "7"
    assert given.with_value("max_steps", "9") == line("--seed 1 --max_steps 5 --max-steps=9")


def test_a_flag_keeps_its_spelling_when_it_is_changed() -> None:
    assert line("--a 1 --learning-rate 5").with_value("learning_rate", "6") == line("--a 1 --learning-rate 6")


def test_a_new_flag_stands_before_positional_arguments() -> None:
    assert line("--a 1 -- file").with_value("seed", "2") == line("--a 1 --seed 2 -- file")
    assert line("--a -- --seed 3").value("seed") is None


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
def test_a_boolean_flag_may_stand_without_a_value(words: str, expected: bool | None) -> None:
    assert line(words).truth("bf16") is expected


def test_a_boolean_flag_without_a_value_gets_one_when_it_is_changed() -> None:
    assert line("--bf16 --fp16").with_value("bf16", "False") == line("--bf16 False --fp16")


def test_a_negative_number_is_a_value_and_an_option_is_none() -> None:
    assert line("--max_steps -1 --seed 1").value("max_steps") == "-1"
    assert line("--deepspeed --seed 1").value("deepspeed") is None


def test_all_of_a_flag_are_removed() -> None:
    assert line("--a 1 --warmup_ratio 0.1 --b --warmup-ratio=0.2").without("warmup_ratio") == line(
        "--a 1 --b"
    )
