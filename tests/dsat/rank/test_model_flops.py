"""Model FLOPs, comparable across a search, and the check of what was measured."""

from __future__ import annotations

from dstrial.dsat.core.candidate import BatchSplit, Candidate
from dstrial.dsat.core.outcome import FailureKind, Measured
from dstrial.dsat.driver import FLOPS_RULE, mismatch_with_request, with_model_flops


def test_model_flops_follow_throughput_and_first_count() -> None:
    first = with_model_flops(Measured({"throughput": 10.0, "FLOPS_per_gpu": 4e12}), None)
    checkpointed = with_model_flops(Measured({"throughput": 10.0, "FLOPS_per_gpu": 6e12}), first)
    compiled = with_model_flops(Measured({"throughput": 20.0}), checkpointed)

    assert first.value("FLOPS_per_gpu") == checkpointed.value("FLOPS_per_gpu") == 4e12
    assert compiled.value("FLOPS_per_gpu") == 8e12


def test_uncounted_flops_come_from_dry_run_or_rule() -> None:
    nothing = Measured({"throughput": 8.0, "num_params": 1e9})

    described = with_model_flops(nothing, None, flops_per_record=1e12, num_replicas=4)
    ruled = with_model_flops(nothing, None, num_replicas=4)
    second = with_model_flops(Measured({"throughput": 16.0, "num_params": 1e9}), ruled)

    assert described.value("FLOPS_per_gpu") == 2e12
    assert not described.value(FLOPS_RULE)
    assert ruled.value("FLOPS_per_gpu") == 6e9 * 8 / 4
    assert second.value("FLOPS_per_gpu") == 6e9 * 16 / 4
    assert second.value(FLOPS_RULE)


def test_mismatch_with_requested_configuration_is_user_error() -> None:
    candidate = Candidate(2, (), BatchSplit(4, 2, 16))
    obedient = {"train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 2.0, "zero_stage": 2.0}

    assert mismatch_with_request(Measured(obedient), candidate) is None
    assert mismatch_with_request(Measured({"throughput": 1.0}), candidate) is None
    assert (
        mismatch_with_request(Measured({**obedient, "zero_stage": 1.0, "num_engines": 2.0}), candidate)
        is None
    )
    failure = mismatch_with_request(
        Measured({**obedient, "train_micro_batch_size_per_gpu": 8.0, "zero_stage": 1.0}), candidate
    )
    assert failure is not None
    assert failure.kind is FailureKind.USER_ERROR
    assert "train_micro_batch_size_per_gpu 8, zero_stage 1; expected 4, 2" in failure.message
