"""Explanations of failed allocations from tracebacks and exit codes."""

from __future__ import annotations

import pytest

from dstrial.master.backends.failures import explain_exit, explain_failure, fingerprint, first_traceback

USER = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: wrong"""
PEER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    all_reduce()
RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4312"""
LAUNCHER = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 900, in main
    run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"""


def lines(*blocks: tuple[int | None, str]) -> list[tuple[int | None, str]]:
    return [(rank, f"{line}\n") for rank, block in blocks for line in block.splitlines()]


def test_first_traceback_prefers_cause_over_peer_and_launcher() -> None:
    printed = lines((1, PEER), (0, USER), (None, LAUNCHER), (None, "end"))

    assert first_traceback(printed) == USER


def test_first_traceback_falls_back_to_launcher_report() -> None:
    assert first_traceback(lines((None, LAUNCHER))) == LAUNCHER
    assert first_traceback(lines((0, "all went well"))) is None


def test_first_traceback_separates_interleaved_ranks() -> None:
    mixed = [line for pair in zip(lines((0, USER)), lines((1, PEER)), strict=True) for line in pair]

    assert first_traceback(mixed) == USER


def test_first_traceback_keeps_chained_exceptions_together() -> None:
    between = "The above exception was the direct cause of the following exception:"
    chained = f"{USER}\n\n{between}\n\n{USER.replace('wrong', 'worse')}"

    found = first_traceback(lines((0, chained), (0, "something else")))

    assert found is not None
    assert found.endswith("ValueError: worse")
    assert "ValueError: wrong" in found


def test_explain_failure_names_rank_error_and_line() -> None:
    report = "rank 1 failed first (exit code 1, host here), whole traceback in /state/rank_1.txt:"
    advice = "This rank held 3 GiB of host memory."
    printed = lines((0, "all went well"), (None, f"{report}\n{USER}\n{advice}"))

    assert explain_failure(printed, USER) == "rank 1: ValueError: wrong (train.py:3, in <module>)"


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        pytest.param([(0, USER)], "ValueError: wrong (train.py:3, in <module>)", id="a foreign launcher"),
        pytest.param([(0, "nothing")], None, id="nothing is printed"),
        pytest.param([(None, LAUNCHER)], None, id="a launcher's report tells nothing"),
        pytest.param(
            [(None, "rank 0 failed first (exit code 1, host h):\nConfigError: x is 1; expected 2.")],
            "rank 0: ConfigError: x is 1; expected 2.",
            id="an error without a traceback",
        ),
        pytest.param(
            [
                (
                    None,
                    "rank 0 failed first (exit code 1, host h):\nTraceback (most recent call last):\n"
                    '  File "model_def.py", line 9, in f\n    g()\n'
                    '  File "/venv/lib/python3.11/site-packages/torch/nn/x.py", line 1, in g\n    h()\nIndexError: x',
                )
            ],
            "rank 0: IndexError: x (model_def.py:9, in f)",
            id="the user's innermost line is the place",
        ),
    ],
)
def test_explain_failure_is_one_line(printed: list[tuple[int | None, str]], told: str | None) -> None:
    found = lines(*printed)
    assert explain_failure(found, first_traceback(found)) == told


def test_fingerprint_ignores_addresses_ports_paths_and_pids() -> None:
    first = "RuntimeError: at 0x7f12 port 29400 in /tmp/dstrial-abc/x, pid 12"
    second = "RuntimeError: at 0x7f99 port 29401 in /tmp/dstrial-xyz/x, pid 77"

    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first) != fingerprint(first.replace("RuntimeError", "KeyError"))


@pytest.mark.parametrize(
    ("code", "signal_number", "part"),
    [(137, 9, "out of host memory"), (137, None, "out of host memory"), (139, None, "SIGSEGV"),
     (127, None, "not found")],
)  # fmt: skip
def test_explain_exit_describes_special_codes(code: int, signal_number: int | None, part: str) -> None:
    assert part in (explain_exit(code, signal_number) or "")


def test_explain_exit_ordinary_code_is_none() -> None:
    assert explain_exit(0) is None
    assert explain_exit(1) is None
