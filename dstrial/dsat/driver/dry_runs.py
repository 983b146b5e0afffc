"""Dry-run every kind of structure in processes of its own. Imports no torch."""

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
from dstrial.dsat.predictor.dry_run_requests import NUM_BATCHES, script_request, trial_request
from dstrial.dsat.predictor.profiles import UNDESCRIBED, PredictInputs
from dstrial.dsat.space.knobs import ZERO
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
    """Dry-run what a search may measure, within ``deadline_s`` seconds in all.

    A failed dry run does not end the search: where all fail, ``asha`` searches in place of ``predict``.
    """
    if settings.space.sizes.has_pipeline_engine:
        # The predictor knows no pipeline: its dry runs would describe one stage, not the step.
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
    """Compare counted FLOPs with the rule for transformers; no notes without tokens.

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
    """Run one dry run for each kind of structure of a space."""
    asked = groups.representatives()
    requests = [request_of(structure, is_accumulating) for structure, is_accumulating in asked.values()]
    parallel = max(min(os.cpu_count() or 1, _MAX_PARALLEL), 1)
    runs: dict[str, DryRunResult] = {}
    failures: dict[str, str] = {}
    for key, found in zip(
        asked, dry_runs(requests, deadline_s=deadline_s, num_parallel=parallel), strict=True
    ):
        if isinstance(found, DryRunError):
            failures[key] = str(found)
        else:
            runs[key] = found
    notes = {note for run in runs.values() for note in run.notes}
    return PredictInputs(
        runs=runs,
        failures=failures,
        described_by="fake tensors" if runs else UNDESCRIBED,
        notes=tuple(sorted(notes)),
    )


def request_maker(settings: SearchConfig, *, target: Target, capacity_bytes: int | None = None) -> RequestOf:
    space: Space = settings.space
    asked = settings.flags.sample_batch
    shared: dict[str, Any] = {
        "world_size": settings.num_slots,
        "target": target,
        "exp_conf": settings.experiment.raw,
        "sample_batch": Path(asked) if isinstance(asked, str) else None,
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
        if settings.trial is None:
            words = python_words(settings.experiment.entrypoint)
            return script_request(words, settings.context_dir, hparams, config, **shared)
        num_batches = asked if isinstance(asked, int) else NUM_BATCHES
        return trial_request(
            settings.trial, settings.context_dir, hparams, config, num_batches=num_batches, **shared
        )

    return request_of


def _by_real_batch(
    groups: ConfigGroups,
    request_of: RequestOf,
    failed: PredictInputs,
    target: Target,
    until_s: float,
) -> PredictInputs:
    """Train one real batch of each kind of structure in turn; the user's own first."""
    failure = next(iter(failed.failures.values())).splitlines()[0]
    reason = f"fake tensors do not do, so one real batch was trained: {failure}"
    on_device = "memory of device and host is not told apart: what is offloaded counts as the device's"
    told = (reason,) if target == "cpu" else (reason, on_device)
    runs: dict[str, DryRunResult] = {}
    failures: dict[str, str] = {}
    for key, (structure, is_accumulating) in groups.representatives().items():
        left_s = max(until_s - time.monotonic(), 0.0)
        (found,) = dry_runs(
            [_as_real(request_of(structure, is_accumulating))], deadline_s=left_s, num_parallel=0
        )
        if isinstance(found, DryRunError):
            failures[key] = str(found)
            if not runs:
                break
        else:
            runs[key] = dataclasses.replace(found, notes=(*found.notes, *told))
    if not runs:
        return dataclasses.replace(
            failed,
            failures=failures,
            notes=(
                "it cannot be described, so that asha searches in place of predict: "
                + next(iter(failures.values()), "").partition("\n")[0],
            ),
        )
    notes = {note for run in runs.values() for note in run.notes}
    return PredictInputs(
        runs=runs, failures=failures, described_by="one real batch", notes=tuple(sorted(notes))
    )


def _as_real(request: DryRunRequest) -> DryRunRequest:
    """Return a request for one real batch on this machine in place of fake tensors."""
    # Real tensors of a CPU are all on the host, so host and device cannot be told apart.
    return dataclasses.replace(request, is_real=True, target="cpu")


def on_one_device(settings: SearchConfig, *, capacity_bytes: int) -> list[tuple[str, DryRunResult]]:
    """Dry-run the model on a single device: as it is, and with all it can offload.

    Returns a description and the result of each dry run that succeeded.
    """
    request_of = request_maker(settings, target="cuda", capacity_bytes=capacity_bytes)
    offloads = (("offload_optimizer", "cpu"), ("offload_param", "cpu"))
    everything = tuple((f"{ZERO}.{section}.device", device) for section, device in offloads)
    kinds = {
        "without offload": Structure(0, tuple((path, "none") for path, _ in everything)),
        "with optimizer and parameters on the host": Structure(3, everything),
    }
    requests = [
        dataclasses.replace(request_of(structure, True), world_size=1) for structure in kinds.values()
    ]
    found = dry_runs(requests, deadline_s=_DEADLINE_S, num_parallel=2)
    return [(kind, run) for kind, run in zip(kinds, found, strict=True) if not isinstance(run, DryRunError)]


def target_here(environment: Mapping[str, str]) -> Target:
    """Return the device kind of local ranks, without imports that would initialize it."""
    if environment.get("DS_ACCELERATOR", "") == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() else "cpu"
