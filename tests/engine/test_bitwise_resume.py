from collections.abc import Iterator
from typing import Any

import forked_ranks
import pytest

pytestmark = pytest.mark.ranks

CASES = [
    "zero 0",
    "zero 1",
    "zero 2",
    "zero 3",
    "zero 0 bf16",
    "zero 3 bf16",
    "zero 1 bf16, fp32 accumulation",
    "pipeline zero 0",
    "pipeline zero 1",
    "pipeline zero 0 bf16",
    "pipeline seeded layers",
    "pipeline tied by function",
    "two pipelines zero 1",
]
BARE = ["zero 0", "pipeline seeded layers", "pipeline tied by function"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forked_ranks.RunningProgram]:
    scratch = tmp_path_factory.mktemp("resume")
    asked = {"scratch": str(scratch), "cases": CASES, "bare": BARE}
    with forked_ranks.RunningProgram("resume_program", asked, scratch) as running:
        yield running


def of_all_ranks(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for rank, result in enumerate(results):
        assert "error" not in result, f"rank {rank}: {result}"
    return results


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    program: forked_ranks.RunningProgram, case: str
) -> None:
    result = program.result(case)
    full, again = of_all_ranks(result["uninterrupted"]), of_all_ranks(result["resumed"])
    for uninterrupted, resumed in zip(full, again, strict=True):
        assert resumed["saved"] == uninterrupted["saved"]
        assert resumed["losses"] == uninterrupted["losses"]
        assert resumed["end"] == uninterrupted["end"]
        assert uninterrupted["end"]["digest"] != uninterrupted["saved"]["digest"]


@pytest.mark.parametrize("case", BARE)
def test_without_the_extra_state_something_is_lost(program: forked_ranks.RunningProgram, case: str) -> None:
    result = program.result(case)
    full, bare = of_all_ranks(result["uninterrupted"]), of_all_ranks(result["bare"])
    assert any(u["end"]["digest"] != b["end"]["digest"] for u, b in zip(full, bare, strict=True))
