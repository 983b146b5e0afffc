"""The fixture ``program`` for tests that share one run of a program on ranks."""

from collections.abc import Iterator

import pytest
from forked_ranks import RunningProgram


@pytest.fixture(scope="module")
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningProgram]:
    """Yield the running rank program that the test module names in ``PROGRAM``."""
    name, argument = request.module.PROGRAM
    scratch = tmp_path_factory.mktemp(name)
    with RunningProgram(name, {"scratch": str(scratch), **argument}, scratch) as running:
        yield running
