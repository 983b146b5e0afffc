"""Make measurements comparable: use one FLOP count, and check the trained batch."""

from __future__ import annotations

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured

FLOPS_RULE = "FLOPS_are_a_rule"
"""Metric that is 1 if ``FLOPS_per_gpu`` follows from a rule of thumb, because no FLOPs could be counted."""

RULE_NOTE = (
    "no FLOPs could be counted, as with compiled or custom kernels: FLOPS_per_gpu assumes 6 for each parameter and record, "
    "and ranks configurations as throughput does all the same"
)
_FLOPS = "FLOPS_per_gpu"
_RULE_PER_PARAMETER = 6


def with_model_flops(
    measured: Measured,
    like: Measured | None,
    *,
    flops_per_record: float | None = None,
    num_replicas: int = 1,
) -> Measured:
    """Return a measurement whose ``FLOPS_per_gpu`` uses the FLOP count of the search.

    All measurements of a search use the same FLOPs per record, so equal throughput gives equal ``FLOPS_per_gpu``. The FLOPs are
    counted in the first measurement, else in a dry run (``flops_per_record``, on one rank), else estimated from the number of
    parameters. ``like`` is an earlier result of this function; None for the first measurement.
    """
    throughput = measured.value("throughput")
    if not throughput:
        return measured
    metrics = dict(measured.metrics)
    if like is not None:
        rate, flops = like.value("throughput"), like.value(_FLOPS)
        if not rate or not flops:
            return measured
        metrics[_FLOPS] = flops / rate * throughput
        if like.value(FLOPS_RULE):
            metrics[FLOPS_RULE] = 1.0
    elif not measured.value(_FLOPS):
        metrics[FLOPS_RULE] = 0.0 if flops_per_record else 1.0
        if not flops_per_record:
            flops_per_record = _RULE_PER_PARAMETER * max(measured.value("num_params") or 0.0, 1.0)
        metrics[_FLOPS] = flops_per_record * throughput / num_replicas
    return Measured(metrics)


def mismatch_with_request(measured: Measured, candidate: Candidate) -> Failure | None:
    """Return a failure if the trial used another batch or ZeRO stage than requested.

    Trials with several engines are not checked: the request may apply to only one of the engines.
    """
    if (measured.value("num_engines") or 1) > 1:
        return None
    requested = {
        "train_micro_batch_size_per_gpu": candidate.batch.micro_batch_size,
        "gradient_accumulation_steps": candidate.batch.accumulation,
        "zero_stage": candidate.stage,
    }
    wrong = {
        name: (found, expected)
        for name, expected in requested.items()
        if (found := measured.value(name)) is not None and round(found) != expected
    }
    if not wrong:
        return None
    trained = ", ".join(f"{name} {round(value)}" for name, (value, _) in wrong.items())
    values = ", ".join(str(value) for _, value in wrong.values())
    return Failure(
        FailureKind.USER_ERROR,
        f"the engine trains with {trained}; expected {values}, as the trial was told. Build its config with "
        "dsat.get_ds_config_from_hparams(hparams), or give the script's arguments to dsat.get_hf_args_with_overwrites.",
    )
