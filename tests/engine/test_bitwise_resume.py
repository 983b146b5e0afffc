import pytest
from forked_ranks import RunningProgram, of_all_ranks

pytestmark = pytest.mark.ranks

CASES = [
    "zero 0",
    "zero 1",
    "zero 2",
    "zero 3",
    "zero 0 bf16",
    "zero 3 bf16",
    "zero 1 bf16, fp32 accumulation",
    "zero 1 muon",
    "zero 2 muon",
    "zero 3 muon",
    "pipeline zero 0",
    "pipeline zero 1",
    "pipeline zero 0 bf16",
    "pipeline seeded layers",
    "pipeline tied by function",
    "two pipelines zero 1",
]
BARE = ["zero 0", "pipeline seeded layers", "pipeline tied by function"]


PROGRAM = ("resume_program", {"cases": CASES, "bare": BARE})


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_bitwise_equal(program: RunningProgram, case: str) -> None:
    result = program.result(case)
    full, again = of_all_ranks(result["uninterrupted"]), of_all_ranks(result["resumed"])
    for uninterrupted, resumed in zip(full, again, strict=True):
        assert resumed["saved"] == uninterrupted["saved"]
        assert resumed["losses"] == uninterrupted["losses"]
        assert resumed["end"] == uninterrupted["end"]
        assert uninterrupted["end"]["digest"] != uninterrupted["saved"]["digest"]


@pytest.mark.parametrize("case", BARE)
def test_resume_without_extra_state_differs(program: RunningProgram, case: str) -> None:
    result = program.result(case)
    full, bare = of_all_ranks(result["uninterrupted"]), of_all_ranks(result["bare"])
    assert any(u["end"]["digest"] != b["end"]["digest"] for u, b in zip(full, bare, strict=True))
