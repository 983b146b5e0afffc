"""A check that raises what nobody expected."""


def run(bench):
    raise ZeroDivisionError("nobody expected this")
