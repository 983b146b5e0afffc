"""Dry-run the model of a search in child processes.

A dry run executes one training step on fake tensors. Some settings, such as ZeRO's, do not change the compute graph: dsat
computes their effect by formulas. One dry run therefore serves all configurations that differ only in such settings. This
module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from dstrial.dsat.backends.trial_spec import measuring_spec, python_words
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.predictor.closed_form import zero_run
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.inputs import NUM_BATCHES, UNDESCRIBED, PredictInputs, dry_run_request
from dstrial.dsat.space import Structure
from dstrial.engine.dryrun.process import DryRunError, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace
from dstrial.local.script_variables import MEASURING_KEYS

DRY_RUNS_DEADLINE_S = 900.0  # of all dry runs together
_MAX_PARALLEL = 4  # dry runs at the same time
# Why some models are not dry-run, for the user.
_PIPELINE_NOTE = "pipelines have no predicted times; `dstrial memory` tells what each stage takes"
_GROUPS_NOTE = "dry runs have no tensor- or sequence-parallel groups: set their sizes to 1 in the config; --space tries others"

Target = Literal["cpu", "cuda"]
"""``cpu`` has one kind of memory; ``cuda`` has device and host memory."""
RequestOf = Callable[[Structure], DryRunRequest]
"""Maps a configuration without batch sizes to the request for its dry run."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphTraces:
    """Results of the dry runs of a search's model, one per distinct compute graph."""

    found: Mapping[str, ModelTrace] = dataclasses.field(default_factory=dict)  # by ``_graph_key``
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> why there is no trace
    described_by: str = UNDESCRIBED  # what the dry runs used: ``fake tensors`` or ``one real batch``
    notes: tuple[str, ...] = ()  # lines for the user

    def inputs(self, groups: ConfigGroups, *, is_cpu: bool = False) -> PredictInputs:
        """Return inputs of method ``predict``: dry runs plus ZeRO's memory and traffic."""
        runs = {}
        for key, (structure, is_accumulating) in groups.representatives().items():
            trace = self.found.get(_graph_key(groups, structure))
            if trace is not None:
                zero = groups.setup(structure)
                runs[key] = zero_run(trace, zero, is_accumulating=is_accumulating, is_cpu=is_cpu)
        return PredictInputs(
            runs=runs,
            failures=self.failures,
            is_cpu=is_cpu,
            described_by=self.described_by,
            notes=self.notes,
        )


def gather_inputs(
    settings: SearchConfig,
    *,
    target: Target,
    deadline_s: float = DRY_RUNS_DEADLINE_S,
    print_line: Callable[[str], None] = lambda _line: None,
) -> PredictInputs:
    """Dry-run the model of a search; return the inputs of method ``predict``.

    ``deadline_s`` limits all dry runs together. ``print_line`` gets lines for the user.
    """
    groups = ConfigGroups(settings.space, is_cpu=target == "cpu")
    traces = trace_graphs(settings, groups, deadline_s=deadline_s, print_line=print_line)
    return traces.inputs(groups, is_cpu=target == "cpu")


def trace_graphs(
    settings: SearchConfig,
    groups: ConfigGroups,
    *,
    deadline_s: float = DRY_RUNS_DEADLINE_S,
    print_line: Callable[[str], None] = lambda _line: None,
) -> GraphTraces:
    """Dry-run each compute graph on fake tensors; if all fail, on real tensors.

    If these fail too, the result has no dry runs, and method ``asha`` replaces ``predict``. Pipelines, and configs with tensor-
    or sequence-parallel groups, are not dry-run; the result is then empty, too. ``deadline_s`` limits all dry runs together.
    ``print_line`` gets lines for the user.
    """
    sizes = settings.space.sizes
    # A dry run has one rank: only one stage of a pipeline, and no tensor- or sequence-parallel groups.
    refusal = (
        _PIPELINE_NOTE if sizes.has_pipeline_engine else _GROUPS_NOTE if sizes.tp * sizes.sp > 1 else None
    )
    if refusal is not None:
        print_line(f"described by:  the first measurement ({refusal})")
        return GraphTraces(failures={"": refusal}, notes=(f"described by the first measurement: {refusal}",))
    until_s = time.monotonic() + deadline_s
    request_of = request_maker(settings)
    number = len(_structures(groups))
    print_line(f"describe:      {number} kind(s) of graphs, with fake tensors")
    traces = trace_space(groups, request_of, deadline_s=deadline_s)
    if not traces.found and time.monotonic() < until_s:
        traces = _by_real_batch(groups, request_of, traces, until_s)
    described, lines = traces.described_by, list(traces.notes)
    if traces.failures and traces.found:
        first = next(iter(traces.failures.values())).splitlines()[0]
        lines.append(f"{len(traces.failures)} of {number} kinds of graphs could not be dry-run: {first}")
    bypasses = {place for trace in traces.found.values() for place in trace.bypasses}
    if bypasses:
        lines.append(f"values read while fake, told a constant: {', '.join(sorted(bypasses))}")
    if traces.found:
        source = "of a loader's first batches the largest" if settings.trial else "a script's first batch"
        if isinstance(settings.flags.sample_batch, str):
            source = f"the batch in {settings.flags.sample_batch}"
        described += f" ({len(traces.found)} of {number} kinds of graphs; {source})"
    print_line(f"described by:  {described}")
    return dataclasses.replace(traces, notes=(f"described by {described}", *lines))


def trace_space(
    groups: ConfigGroups,
    request_of: RequestOf,
    *,
    deadline_s: float = DRY_RUNS_DEADLINE_S,
    is_real: bool = False,
) -> GraphTraces:
    """Dry-run one configuration per compute graph, on real tensors if ``is_real``.

    ``request_of`` maps a configuration without batch sizes to the request for its dry run.
    """
    asked = _structures(groups)
    requests = [dataclasses.replace(request_of(structure), is_real=is_real) for structure in asked.values()]
    num_parallel = 1 if is_real else min(os.cpu_count() or 1, _MAX_PARALLEL)
    answers = dict(
        zip(asked, dry_runs(requests, deadline_s=deadline_s, num_parallel=num_parallel), strict=True)
    )
    found = {key: one for key, one in answers.items() if isinstance(one, ModelTrace)}
    described_by = "one real batch" if is_real else "fake tensors"
    return GraphTraces(
        found,
        {key: str(one) for key, one in answers.items() if isinstance(one, DryRunError)},
        described_by if found else UNDESCRIBED,
        tuple(sorted({note for trace in found.values() for note in trace.notes})),
    )


def _structures(groups: ConfigGroups) -> dict[str, Structure]:
    """Return :func:`_graph_key` -> a configuration of that graph, without batch sizes."""
    asked = reversed(groups.representatives().values())
    return {_graph_key(groups, structure): structure for structure, _ in asked}


def _graph_key(groups: ConfigGroups, structure: Structure) -> str:
    """Return a key; configurations that share it presumably have one compute graph."""
    return json.dumps(groups.unknown_settings(structure))


def request_maker(settings: SearchConfig) -> RequestOf:
    """Return a function that makes the requests for dry runs of a search.

    It maps a configuration without batch sizes to the request for its dry run.
    """
    space, asked = settings.space, settings.flags.sample_batch
    shared: dict[str, Any] = {
        "world_size": settings.num_slots,
        "exp_conf": settings.experiment.raw,
        "sample_batch": Path(asked) if isinstance(asked, str) else None,
        "num_batches": asked if isinstance(asked, int) else NUM_BATCHES,
        "trusts_code": settings.flags.trust_code,
    }

    def request_of(structure: Structure) -> DryRunRequest:
        candidate = space.candidate(structure, 0)
        hparams = {
            key: value
            for key, value in measuring_spec(settings, candidate, 0, "described").hparams.items()
            if key not in MEASURING_KEYS
        }
        code = settings.trial or python_words(settings.experiment.entrypoint)
        return dry_run_request(code, settings.context_dir, hparams, **shared)

    return request_of


def _by_real_batch(
    groups: ConfigGroups, request_of: RequestOf, failed: GraphTraces, until_s: float
) -> GraphTraces:
    failure = next(iter(failed.failures.values())).splitlines()[0]
    deadline_s = max(until_s - time.monotonic(), 0.0)
    traces = trace_space(groups, request_of, deadline_s=deadline_s, is_real=True)
    if traces.found:
        note = f"fake tensors do not do, so one real batch was trained: {failure}"
        return dataclasses.replace(traces, notes=(*traces.notes, note))
    reason = next(iter(traces.failures.values()), "").partition("\n")[0]
    note = f"it cannot be described, so that asha searches in place of predict: {reason}"
    return dataclasses.replace(traces, notes=(note,))


def target_here(environment: Mapping[str, str]) -> Target:
    """Return the device type of ranks on this machine, without initializing a device."""
    if environment.get("DS_ACCELERATOR", "") == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() else "cpu"
