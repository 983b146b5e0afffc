"""Lets the tests of every room below import what is shared here: models and programs on ranks."""

from collections.abc import Iterator

import pytest
from forked_ranks import RunningProgram


@pytest.fixture(scope="module")
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningProgram]:
    """The rank program that the test's module names as ``PROGRAM``: its name and argument."""
    name, argument = request.module.PROGRAM
    scratch = tmp_path_factory.mktemp(name)
    with RunningProgram(name, {"scratch": str(scratch), **argument}, scratch) as running:
        yield running
