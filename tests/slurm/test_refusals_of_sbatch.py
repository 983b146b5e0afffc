"""What sbatch's words mean, without a word to Slurm."""

from __future__ import annotations

import pytest

from dstrial.slurm.client import fix_for, is_refusal, refused, words_of


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "sbatch: Job 1 to start at 2026-11-25T19:54:11 using 1 processors on nodes host1", False),
        (1, "sbatch: error: invalid partition specified: nope", True),
        (1, "allocation failure: Requested node configuration is not available", True),
        (0, "allocation failure: Requested node configuration is not available", True),
        (255, "sbatch: unrecognized option '--frobnicate'", True),
        (1, "allocation failure: Required partition not available (inactive or drain)", False),
        (1, "allocation failure: Required node not available (down, drained or reserved)", False),
        (1, "allocation failure: Job violates accounting/QOS policy (job submit limit)", False),
        (
            1,
            "sbatch: error: AssocMaxSubmitJobLimit\nallocation failure: Job violates accounting/QOS policy",
            False,
        ),
        (
            1,
            "sbatch: error: QOSGrpSubmitJobsLimit\nallocation failure: Job violates accounting/QOS policy",
            False,
        ),
        (
            1,
            "sbatch: error: QOSMaxCpuPerJobLimit\nallocation failure: Job violates accounting/QOS policy",
            True,
        ),
        (
            1,
            "sbatch: error: QOSMaxWallDurationPerJobLimit\nJob violates accounting/QOS policy (and so on)",
            True,
        ),
    ],
)
def test_what_may_be_otherwise_later_is_no_refusal(code: int, said: str, *, expected: bool) -> None:
    assert is_refusal(code, said) == expected


def test_a_refusal_has_the_words_in_one_line_and_what_to_do() -> None:
    said = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n"
    assert words_of(said) == (
        "invalid partition specified: nope; allocation failure: Invalid partition name specified"
    )
    assert (fix_for(said) or "").startswith("Name one that `sinfo` lists")
    assert fix_for("anything else") is None
    assert refused("sbatch: error: anything else", "/x.sh") == (
        "Slurm does not take the job; sbatch says: anything else. Look at /x.sh."
    )
    assert words_of("") == "nothing"


def test_fix_for_full_queue_differs_from_job_limit() -> None:
    policy = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    full, large = f"AssocMaxSubmitJobLimit\n{policy}", f"QOSMaxCpuPerJobLimit\n{policy}"
    assert (fix_for(full) or "").startswith("Wait until jobs of yours have ended")
    assert (fix_for(large) or "").startswith("Ask for less, or name another QOS or account")
