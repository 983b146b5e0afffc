"""A check that has nothing to look at."""

from dstrial.doctor.training.check import NotApplicableError


def run(bench):
    raise NotApplicableError("there is no such thing here", "Get one.")
