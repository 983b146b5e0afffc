"""Request dry runs, fake or with one real batch. Imports no torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.engine.dryrun.process import DryRunError, dry_run
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult, Target

logger = logging.getLogger("dstrial.dsat")

NUM_BATCHES = 4
"""Of so many first batches of a training loader the largest counts, unless told otherwise."""

_TRIAL = "dstrial.dsat.rank.trace_trial:TrialWorkload"
_SCRIPT = "dstrial.dsat.rank.trace_script:ScriptWorkload"


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
    """Return the request of a trial's dry run, of the first replica's rank of a pipeline's ``stage``."""
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


def as_real(request: DryRunRequest) -> DryRunRequest:
    """Return a request for one real batch on this machine in place of fake tensors."""
    # Real tensors of a CPU are all on the host, so host and device cannot be told apart.
    shared_options = {**request.shared_options, "is_real": True}
    return dataclasses.replace(request, shared_options=shared_options, is_real=True, target="cpu")


def why_real(error: DryRunError) -> str:
    """Return, for a person, why one real batch takes the place of fake tensors."""
    place = "" if error.place is None else f" at {error.place}"
    return f"fake tensors do not do{place}, so one real batch was trained: {str(error).splitlines()[0]}"


def with_notes(result: DryRunResult, reason: str, target: Target) -> DryRunResult:
    """Return a real run's result with notes for a person."""
    notes = [*result.notes, reason]
    if target != "cpu":
        notes.append("memory of device and host is not told apart: what is offloaded counts as the device's")
    return dataclasses.replace(result, notes=tuple(notes))


def describe(request: DryRunRequest, *, deadline_s: float = 300.0, may_be_real: bool = True) -> DryRunResult:
    """Return what one configuration needs, for any micro batch size."""
    try:
        return dry_run(request, deadline_s=deadline_s)
    except DryRunError as error:
        if not may_be_real or error.kind == "deadline":
            raise
        reason = why_real(error)
    logger.warning("%s", reason)
    return with_notes(dry_run(as_real(request), deadline_s=deadline_s), reason, request.target)
