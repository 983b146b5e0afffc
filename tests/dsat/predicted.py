"""Made-up dry-run results and ``predict`` inputs for the model of ``surfaces``."""

from __future__ import annotations

import dataclasses
from typing import Any

from surfaces import ACTIVATION_BYTES, DEVICE_BYTES, PARAMS, SIZES, space

from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.dsat.predictor.hardware import DEVICES, nominal_machine
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.space import Space
from dstrial.engine.dryrun.values import Collective, DryRunResult, Flops, Line, MemoryForm, PhaseMemory


def dry_run(**fields: Any) -> DryRunResult:
    """Return a dry-run result for 1 B parameters; ``fields`` override its values."""
    usual: dict[str, Any] = {
        "device": MemoryForm((), 0.0),
        "host": MemoryForm((), 0.0),
        "parameters": 1_000_000_000,
        "trainable_parameters": 1_000_000_000,
        "inner_collectives": (),
        "last_collectives": (),
        "flops": Flops(Line(0.0, 1e13), Line(0.0, 1e13)),
        "tokens": None,
    }
    return DryRunResult(**{**usual, **fields})


def _run_of_surface(setup: ZeroFeatures, *, is_accumulating: bool) -> DryRunResult:
    """Return a plausible result for the ``surfaces`` model in bf16 with Adam."""
    shares = [1 if setup.stage < stage else 1 / SIZES.dp for stage in (3, 2, 1)]
    weights, gradients, optimizer = (
        size * PARAMS * share for size, share in zip((2, 2, 12), shares, strict=True)
    )
    state = weights * (not setup.has_host_params) + gradients + optimizer * (1 - setup.host_share)
    phases = (
        PhaseMemory("forward", (Line(state, ACTIVATION_BYTES),)),
        PhaseMemory("backward", (Line(state + setup.bucket_bytes, ACTIVATION_BYTES),)),
        PhaseMemory("step", (Line(state + 4 * PARAMS * shares[-1], 0.0),)),
    )
    reduce = Collective("all_reduce", 8, "reduce", 3, int(2 * PARAMS))
    gather = Collective("all_gather", 8, "gather", 100 if setup.stage == 3 else 3, int(2 * PARAMS))
    last = {0: (reduce,), 1: (reduce, gather), 2: (reduce, gather), 3: (reduce, gather)}[setup.stage]
    inner = {0: (), 1: (), 2: (reduce,), 3: (reduce, gather)}[setup.stage] if is_accumulating else ()
    return dry_run(
        device=MemoryForm(phases, state),
        host=MemoryForm((), setup.host_share * 12 * PARAMS / SIZES.dp),
        parameters=int(PARAMS),
        trainable_parameters=int(PARAMS),
        inner_collectives=inner,
        last_collectives=last,
        flops=Flops(Line(0.0, 8e12), Line(0.0, 8e12)),
        inner_operations=400 if is_accumulating else 0,
        last_operations=400,
    )


def inputs(capacity_bytes: float | None = DEVICE_BYTES, searched: Space | None = None) -> PredictInputs:
    """Return the inputs of ``predict`` for the ``surfaces`` model."""
    groups = ConfigGroups(searched or space())
    runs = {
        key: _run_of_surface(groups.setup(structure), is_accumulating=is_accumulating)
        for key, (structure, is_accumulating) in groups.representatives().items()
    }
    machine = nominal_machine(DEVICES["a100"], 8)
    # In the formula of ``surfaces``, each small bucket costs about as much as a call of 1 ms.
    links = {kind: dataclasses.replace(link, latency_s=1e-3) for kind, link in machine.collectives.items()}
    machine = dataclasses.replace(machine, collectives=links)
    return PredictInputs(runs, {}, machine, capacity_bytes, False, "fake tensors")
