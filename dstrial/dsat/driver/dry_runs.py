"""Dry-run each kind of structure in child processes, without importing torch here."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dstrial.dsat.backends.trial_spec import measuring_spec, python_words
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.inputs import NUM_BATCHES, UNDESCRIBED, PredictInputs, dry_run_request
from dstrial.dsat.space.space import Space, Structure
from dstrial.engine.dryrun.process import DryRunError, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult, Target
from dstrial.local.script_variables import MEASURING_KEYS

_DEADLINE_S = 900.0
_MAX_PARALLEL = 4
_USUAL_FLOPS_RATIO = 0.5, 2.0
_PIPELINE_NOTE = "pipelines are not dry-run; `dstrial memory` tells what each stage takes"

RequestOf = Callable[[Structure, bool], DryRunRequest]


def gather_inputs(
    settings: SearchConfig,
    *,
    target: Target,
    capacity_bytes: int | None = None,
    deadline_s: float = _DEADLINE_S,
    print_line: Callable[[str], None] = lambda _line: None,
) -> PredictInputs:
    """Dry-run one configuration of each kind; return the inputs of method ``predict``.

    A dry run builds the engine and trains a batch on fake tensors. If all fail, method ``asha`` replaces ``predict``.
    ``deadline_s`` limits all dry runs together; ``capacity_bytes`` is the memory of one device.
    """
    if settings.space.sizes.has_pipeline_engine:
        # The predictor has no model of pipelines: its dry runs would describe one stage, not the step.
        print_line(f"described by:  the first measurement ({_PIPELINE_NOTE})")
        return PredictInputs(
            failures={"pipeline": _PIPELINE_NOTE}, is_cpu=target == "cpu", notes=(_PIPELINE_NOTE,)
        )
    request_of = request_maker(settings, target=target, capacity_bytes=capacity_bytes)
    groups = ConfigGroups(settings.space, is_cpu=target == "cpu")
    number = len(groups.representatives())
    print_line(
        f"describe:      {number} kinds of structures at {settings.num_slots} rank(s), with fake tensors"
    )
    until_s = time.monotonic() + deadline_s
    inputs = dry_run_space(groups, request_of, deadline_s=deadline_s)
    if not inputs.runs and inputs.failures and time.monotonic() < until_s:
        inputs = _by_real_batch(groups, request_of, inputs, target, until_s)
    lines = list(inputs.notes)
    failed = len(inputs.failures)
    if failed and inputs.runs:
        first = next(iter(inputs.failures.values())).splitlines()[0]
        lines.append(f"{failed} of {number} kinds of structures could not be dry-run: {first}")
    bypasses = {bypass.place for run in inputs.runs.values() for bypass in run.bypasses}
    if bypasses:
        lines.append(f"values read while fake, told a constant: {', '.join(sorted(bypasses))}")
    described = inputs.described_by
    if inputs.runs:
        source = "of a loader's first batches the largest" if settings.trial else "a script's first batch"
        if isinstance(settings.flags.sample_batch, str):
            source = f"the batch in {settings.flags.sample_batch}"
        described += f" ({len(inputs.runs)} of {number} kinds of structures; {source})"
    print_line(f"described by:  {described}")
    lines.insert(0, f"described by {described}")
    lines += flops_notes(inputs.runs.values(), settings.space.own().batch.micro_batch_size)
    return dataclasses.replace(
        inputs,
        capacity_bytes=None if capacity_bytes is None else float(capacity_bytes),
        is_cpu=target == "cpu",
        notes=tuple(lines),
    )


def flops_notes(runs: Iterable[DryRunResult], micro_batch_size: int) -> list[str]:
    """Return a note that compares counted FLOPs with the rule for transformers.

    The list is empty if no dry run's batch has tokens.

    Source: 6 FLOPs per parameter and token, Kaplan et al. 2020, section 2.1.
    """
    ratio = next((found for run in runs if (found := run.flops_ratio(micro_batch_size)) is not None), None)
    if ratio is None:
        return []
    note = f"model FLOPs are {ratio:.3g} x 6 x parameters x tokens"
    if not _USUAL_FLOPS_RATIO[0] <= ratio <= _USUAL_FLOPS_RATIO[1]:
        note += (
            ", far from the 1 of a transformer: convolutions, experts, long sequences, labels that are no tokens, or "
            "kernels whose FLOPs are not counted"
        )
    return [note]


def dry_run_space(
    groups: ConfigGroups, request_of: RequestOf, *, deadline_s: float = _DEADLINE_S
) -> PredictInputs:
    """Dry-run one configuration of each kind; return the results and failures.

    ``groups`` says which configurations are of a kind. ``request_of`` returns the request for a structure and whether it
    accumulates gradients. ``deadline_s`` limits all dry runs together.
    """
    asked = groups.representatives()
    requests = [request_of(structure, is_accumulating) for structure, is_accumulating in asked.values()]
    num_parallel = min(os.cpu_count() or 1, _MAX_PARALLEL)
    found = dry_runs(requests, deadline_s=deadline_s, num_parallel=num_parallel)
    return _inputs(dict(zip(asked, found, strict=True)), "fake tensors")


def _inputs(found: Mapping[str, DryRunResult | DryRunError], described_by: str) -> PredictInputs:
    runs = {key: run for key, run in found.items() if isinstance(run, DryRunResult)}
    return PredictInputs(
        runs=runs,
        failures={key: str(error) for key, error in found.items() if isinstance(error, DryRunError)},
        described_by=described_by if runs else UNDESCRIBED,
        notes=tuple(sorted({note for run in runs.values() for note in run.notes})),
    )


def request_maker(settings: SearchConfig, *, target: Target, capacity_bytes: int | None = None) -> RequestOf:
    space: Space = settings.space
    asked = settings.flags.sample_batch
    shared: dict[str, Any] = {
        "world_size": settings.num_slots,
        "target": target,
        "exp_conf": settings.experiment.raw,
        "sample_batch": Path(asked) if isinstance(asked, str) else None,
        "num_batches": asked if isinstance(asked, int) else NUM_BATCHES,
        "trusts_code": settings.flags.trust_code,
        "device_bytes": capacity_bytes,
    }

    def request_of(structure: Structure, is_accumulating: bool) -> DryRunRequest:
        candidate = space.candidate(structure, 0 if is_accumulating else space.batch_size_grid.last)
        hparams = {
            key: value
            for key, value in measuring_spec(settings, candidate, 0, "described").hparams.items()
            if key not in MEASURING_KEYS
        }
        config = space.config(candidate)
        code = settings.trial or python_words(settings.experiment.entrypoint)
        return dry_run_request(code, settings.context_dir, hparams, config, **shared)

    return request_of


def _by_real_batch(
    groups: ConfigGroups,
    request_of: RequestOf,
    failed: PredictInputs,
    target: Target,
    until_s: float,
) -> PredictInputs:
    """Train one real batch per kind of configuration on the CPU, the user's own first."""
    failure = next(iter(failed.failures.values())).splitlines()[0]
    notes = [f"fake tensors do not do, so one real batch was trained: {failure}"]
    if target != "cpu":
        notes.append("memory of device and host is not told apart: what is offloaded counts as the device's")
    found: dict[str, DryRunResult | DryRunError] = {}
    for key, (structure, is_accumulating) in groups.representatives().items():
        # Real tensors of a CPU are all on the host, so host and device cannot be told apart.
        request = dataclasses.replace(request_of(structure, is_accumulating), is_real=True, target="cpu")
        (run,) = dry_runs([request], deadline_s=max(until_s - time.monotonic(), 0.0))
        found[key] = run
        if isinstance(run, DryRunResult):
            found[key] = dataclasses.replace(run, notes=(*run.notes, *notes))
        elif len(found) == 1:
            break
    inputs = _inputs(found, "one real batch")
    if inputs.runs:
        return inputs
    reason = next(iter(inputs.failures.values()), "").partition("\n")[0]
    note = f"it cannot be described, so that asha searches in place of predict: {reason}"
    return dataclasses.replace(failed, failures=inputs.failures, notes=(note,))


def target_here(environment: Mapping[str, str]) -> Target:
    """Return the device kind of ranks on this machine, without initializing a device."""
    if environment.get("DS_ACCELERATOR", "") == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() else "cpu"
