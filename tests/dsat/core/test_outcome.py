"""Classifying failed measurements, and scoring successful ones."""

from __future__ import annotations

import pytest

from dstrial.dsat.core.candidate import BatchSplit, Candidate
from dstrial.dsat.core.outcome import (
    HIGHEST_EXPECTED,
    LOWEST_EXPECTED,
    Failure,
    FailureKind,
    Measured,
    TrialResult,
    best_of,
    classify,
    failure_from_log,
    failure_line,
    mean_of,
    outcome_from_json,
    outcome_to_json,
    score,
    with_means,
)

_FRAME = (
    'Traceback (most recent call last):\n  File "/site-packages/deepspeed/runtime/engine.py", line 1, in f\n'
)


_TEXTS = {
    FailureKind.DEVICE_OOM: [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
    ],
    FailureKind.HOST_OOM: [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
    FailureKind.BAD_CONFIG: [
        _FRAME + "AssertionError: Check batch related parameters. train_batch_size is",
        _FRAME + "AssertionError: zero stage 2 requires an optimizer",
        "dstrial.errors.ConfigError: ds.json: zero_optimization.stage is 5; expected 0 to 3.",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig",
        _FRAME + "RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to "
        "hardware/software issue. None",
        "dstrial.errors.DataError: the training loader has 1437 records; expected at least one batch of 4096 (2048 per",
    ],
    FailureKind.USER_ERROR: [
        "dstrial.errors.DataError: the training loader has 0 records; expected at least one batch of 32 (32 per",
        "ModuleNotFoundError: No module named 'mine'",
        '  File "/home/me/model_def.py", line 3\nAssertionError: my own',
    ],
    FailureKind.COMMUNICATION: [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer",
    ],
    FailureKind.NO_ROOM: [
        "OSError: [Errno 28] No space left on device: 'x'",
        "RuntimeError: [enforce fail at inline_container.cc:815] . PytorchStreamWriter failed writing file data/3: file "
        "write failed",
        "sqlite3.OperationalError: database or disk is full",
    ],
    FailureKind.NUMERIC: ["Exception: Current loss scale already at minimum - cannot decrease scale anymore"],
}


@pytest.mark.parametrize("kind", _TEXTS)
def test_classify_traceback_returns_kind(kind: FailureKind) -> None:
    for text in _TEXTS[kind]:
        assert classify(text, phase="init").kind is kind, text


def test_classify_reads_phase_and_requested_bytes() -> None:
    text = _FRAME + "AssertionError: something else"
    assert classify(text, phase="backward").kind is FailureKind.USER_ERROR
    sizes = {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.": int(2.5 * 2**30),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.": 20 * 2**20,
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.": 4000,
    }
    for text, num_bytes in sizes.items():
        assert classify(text, phase="forward") == Failure(classify(text).kind, text, "forward", num_bytes)


def test_failure_from_log_prefers_root_cause() -> None:
    cause = Failure(FailureKind.DEVICE_OOM, "out of memory", "forward", 100, 900, rank=1)
    lost = Failure(FailureKind.COMMUNICATION, "Connection closed by peer", "backward", rank=0)
    lines = ["[rank=0] " + failure_line(lost), "noise", "2026-01-01 [rank=1] || " + failure_line(cause)]

    assert failure_from_log(lines, exit_code=1) == cause
    assert failure_from_log(["nothing"], exit_code=137).kind is FailureKind.HOST_OOM


def test_failure_from_log_strips_master_prefixes() -> None:
    before = "[2026-01-01T00:00:00.000000Z] 1a2b3c4d"
    log = [
        f"{before} [rank=1] || ValueError: mine",
        f"{before} || ERROR: Trial 1 (Experiment 1) crashed: resources failed with non-zero exit code",
        f"{before} || ERROR: trial 1 has failed: max_restarts is 0",
    ]
    native = [f"{before} || rank 0 failed first (killed by SIGABRT, host vm):", *log[1:]]

    assert failure_from_log(log) == Failure(FailureKind.USER_ERROR, "ValueError: mine")
    assert failure_from_log(native).message == "rank 0 failed first (killed by SIGABRT, host vm):"


def test_classify_elided_deepspeed_frames_is_bad_config() -> None:
    log = [
        "rank 0 failed first (exit code 1, host vm), whole traceback in /state/rank_0.txt:",
        "Traceback (most recent call last):",
        '  File "model_def.py", line 9, in __init__',
        "    engine, *_ = deepspeed.initialize(model=model, config=config)",
        "  [6 more frames: 1 of dstrial, 5 of deepspeed; raised in deepspeed/runtime/engine.py:901]",
        "AssertionError: DeepSpeed refuses this pair; expected another",
        "ERROR: Trial 1 (Experiment 1) crashed: resources failed with non-zero exit code: rank 0: AssertionError: x; expected y",
        "ERROR: trial 1 has failed: max_restarts is 0",
    ]

    found = failure_from_log(log, exit_code=1)

    assert found == Failure(
        FailureKind.BAD_CONFIG, "AssertionError: DeepSpeed refuses this pair; expected another"
    )


def test_outcomes_survive_json_without_non_finite_values() -> None:
    measured = Measured({"throughput": 2.0, "half_width": float("inf")})
    failure = Failure(FailureKind.TIMEOUT, "late", "", None, None, 3)

    assert outcome_from_json(outcome_to_json(measured)) == Measured({"throughput": 2.0})
    assert outcome_from_json(outcome_to_json(failure)) == failure


def test_score_of_times_is_negative() -> None:
    slow, fast = Measured({"latency": 2.0}), Measured({"latency": 1.0})

    assert (score(fast, "latency") or 0) > (score(slow, "latency") or 0)
    assert score(Measured({}), "latency") is None
    with pytest.raises(ValueError, match="expected one of"):
        score(Measured({"x": 1.0, "flops": 1.0}), "flops")


def test_best_of_uses_mean_of_repeats() -> None:
    lucky, steady = (Candidate(stage, (), BatchSplit(1, 1, 1)) for stage in (1, 2))
    rates = [(lucky, 110.0), (steady, 105.0), (lucky, 90.0)]
    trials = [
        TrialResult(number, candidate, "", "new", Measured({"throughput": rate}), 60.0)
        for number, (candidate, rate) in enumerate(rates, 1)
    ]

    best = best_of(trials, "throughput")
    mean, alone = with_means(trials)

    assert best == alone == trials[1]
    assert (mean.score("throughput"), mean.seconds) == (100.0, 120.0)
    assert mean.why == "new; mean of 2 measurements"


@pytest.mark.parametrize(
    ("latencies", "half_width"),
    [((100.0,), 0.01), ((100.0, 100.0, 100.0, 100.0), 0.005), ((98.0, 102.0), 0.0392)],
    ids=["one", "agreeing", "disagreeing"],
)
def test_repeats_narrow_or_widen_interval(latencies: tuple[float, ...], half_width: float) -> None:
    mean = mean_of([Measured({"latency": one, "half_width": 0.01}) for one in latencies])

    assert mean.value("latency") == 100.0
    assert mean.value("half_width") == pytest.approx(half_width, rel=1e-3)


def test_repeats_have_widest_expected_range() -> None:
    bounds = ((90.0, 105.0), (95.0, 110.0))

    mean = mean_of(
        [Measured({"latency": 1.0, LOWEST_EXPECTED: low, HIGHEST_EXPECTED: high}) for low, high in bounds]
    )

    assert (mean.value(LOWEST_EXPECTED), mean.value(HIGHEST_EXPECTED)) == (90.0, 110.0)
