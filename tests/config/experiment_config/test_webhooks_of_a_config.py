"""Which webhooks a config may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_configs import EXPERIMENT, BadConfig, write

from dstrial.config import load_experiment
from dstrial.errors import ConfigError


def problems(tmp_path: Path, integrations: str) -> list[str]:
    path, context = write(
        BadConfig("none", (), None, f"{EXPERIMENT}integrations: {integrations}\n"), tmp_path
    )
    try:
        load_experiment(path, context)
    except ConfigError as error:
        return [str(one) for one in error.problems]
    return []


@pytest.mark.parametrize(
    "good",
    [
        "null",
        "{pachyderm: {dataset: {branch: x}}}",
        "{webhooks: null}",
        "{webhooks: {webhook_id: [1, 2], webhook_name: [a], exclude: true}}",
        "{webhooks: {webhook_id: null, exclude: null}}",
    ],
)
def test_webhooks_are_named_by_number_and_by_name(tmp_path: Path, good: str) -> None:
    assert problems(tmp_path, good) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("[a]", ["integrations is"]),
        ("{webhooks: [a]}", ["integrations.webhooks is"]),
        (
            "{webhooks: {webhook_id: 1, webhook_name: a, exclude: 2, webhook: x}}",
            ["webhooks.webhook is", "webhook_id is 1", "webhook_name is", "exclude is 2"],
        ),
        ("{webhooks: {webhook_id: [true], webhook_name: [1]}}", ["webhook_id is", "webhook_name is"]),
    ],
)
def test_what_names_none_is_a_problem(tmp_path: Path, bad: str, words: list[str]) -> None:
    found = problems(tmp_path, bad)
    assert len(found) == len(words)
    for problem, word in zip(found, words, strict=True):
        assert word in problem
