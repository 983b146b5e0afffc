"""Requests of dry runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.engine.dryrun.values import DryRunRequest, Target

NUM_BATCHES = 4
"""Of so many first batches of a training loader the largest counts, unless told otherwise."""

_TRIAL = "dstrial.dsat.rank.workloads:TrialWorkload"
_SCRIPT = "dstrial.dsat.rank.workloads:ScriptWorkload"


def trial_request(
    trial: str,
    context_dir: Path,
    hparams: Mapping[str, Any],
    deepspeed_config: Mapping[str, Any],
    *,
    world_size: int,
    target: Target = "cpu",
    exp_conf: Mapping[str, Any] | None = None,
    num_batches: int = NUM_BATCHES,
    sample_batch: Path | None = None,
    trusts_code: bool = False,
    device_bytes: int | None = None,
    num_stages: int = 1,
    stage: int = 0,
) -> DryRunRequest:
    """Return the request of a trial's dry run, on a pipeline's ``stage``."""
    shared_options: dict[str, Any] = {"trial": trial, "context_dir": str(context_dir.resolve())}
    options = {
        "hparams": dict(hparams),
        "exp_conf": None if exp_conf is None else dict(exp_conf),
        "num_batches": num_batches,
        "sample_batch": None if sample_batch is None else str(sample_batch.resolve()),
        "trusts_code": trusts_code,
    }
    if num_stages > 1:
        shared_options["num_stages"] = num_stages
    return DryRunRequest(
        workload=_TRIAL,
        shared_options=shared_options,
        options=options,
        rank=stage * (world_size // num_stages),
        deepspeed_config=deepspeed_config,
        world_size=world_size,
        target=target,
        device_bytes=device_bytes,
        module_paths=(str(context_dir.resolve()),),
    )


def script_request(
    words: Sequence[str],
    context_dir: Path,
    hparams: Mapping[str, Any],
    deepspeed_config: Mapping[str, Any],
    *,
    world_size: int,
    target: Target = "cpu",
    exp_conf: Mapping[str, Any] | None = None,
    sample_batch: Path | None = None,
    trusts_code: bool = False,
    device_bytes: int | None = None,
) -> DryRunRequest:
    """Return a script's dry run request: run until its engine gets the first batch.

    ``words`` are the script, or ``-m`` and a module, and its arguments. ``sample_batch`` is a file with what the engine is called
    with: a mapping of keyword arguments, or positional ones.
    """
    return DryRunRequest(
        workload=_SCRIPT,
        options={
            "words": list(words),
            "hparams": dict(hparams),
            "exp_conf": None if exp_conf is None else dict(exp_conf),
            "sample_batch": None if sample_batch is None else str(sample_batch.resolve()),
            "trusts_code": trusts_code,
        },
        deepspeed_config=deepspeed_config,
        world_size=world_size,
        target=target,
        device_bytes=device_bytes,
        module_paths=(str(context_dir.resolve()),),
    )
