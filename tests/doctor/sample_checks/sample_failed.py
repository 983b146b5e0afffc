"""A check that fails with a reason."""

from dstrial.doctor.training.check import CheckFailedError


def run(bench):
    raise CheckFailedError("the wheel is square", "Buy a round one.", "what it printed")
