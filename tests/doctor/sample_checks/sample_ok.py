"""A check that finds something."""

from dstrial.doctor.training.check import Finding


def run(bench):
    bench.note(answer=42, rows=[{"a": 1, "b": True}])
    return Finding("it works", "the other half")
