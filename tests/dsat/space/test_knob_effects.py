"""Detecting knobs without effect, and parallel sizes as knobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from predicted import inputs
from surfaces import BASE, play, space, surface

from dstrial.config.parallel_dims import ParallelDims
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, Measured, Outcome
from dstrial.dsat.driver.dry_runs import _structures
from dstrial.dsat.methods.base import Note
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.predictor import Predictor
from dstrial.dsat.space.filters import KnobEffect, best_knob_effects
from dstrial.dsat.space.space import Space, Structure, efficiency, enough_accumulation, first_position
from dstrial.engine.dryrun.values import Line
from dstrial.errors import ConfigError

RECOMPUTES, UNREAD, WORKERS = (f"hyperparameters.{name}" for name in ("recomputes", "unread", "workers"))
PIPELINE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}


def _outcome(candidate: Candidate) -> Outcome:
    """RECOMPUTES changes probes and time, WORKERS only the time, UNREAD nothing."""
    found = surface(candidate)
    if isinstance(found, Failure):
        return found
    settings = dict(candidate.settings)
    factor = 0.9 if settings.get(WORKERS) == 4 else 1.0
    if settings.get(RECOMPUTES):
        factor *= 1.3
    metrics = {
        **found.metrics,
        "latency": found.metrics["latency"] * factor,
        "throughput": found.metrics["throughput"] / factor,
        "half_width": 0.01,
        "probe_operations": 400.0 if settings.get(RECOMPUTES) else 300.0,
        "probe_modules": 12.0,
    }
    return Measured(metrics)


def _knobs() -> Space:
    extra = {RECOMPUTES: [False, True], UNREAD: ["a", "b", "c"], WORKERS: [0, 4]}
    return space(extra=extra, hyperparameters={"recomputes": False, "unread": "a", "workers": 0})


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_dead_knob_is_reported_and_not_remeasured(method: str) -> None:
    played = play(method, _knobs(), metric="throughput", outcome_of=_outcome, max_trials=40)

    told = [action.text for action in played.actions if isinstance(action, Note)]
    assert any(
        f"{RECOMPUTES} proved with false -> true: operations of a micro batch 300 -> 400" in text
        for text in told
    )
    assert any(text.startswith(f"{WORKERS} proved with 0 -> 4: time of a step") for text in told)
    assert [text for text in told if f"{UNREAD} is dead" in text]
    proving = [one for one in played.measured if "prove" in one.why]
    assert [one.candidate.settings for one in proving] == [
        ((RECOMPUTES, True),),
        ((UNREAD, "b"),),
        ((UNREAD, "c"),),
        ((WORKERS, 4),),
    ]
    seen = set()
    for one in played.measured:
        if one not in proving:
            rest = tuple(pair for pair in one.candidate.settings if pair[0] != UNREAD)
            assert (one.candidate.stage, rest, one.candidate.batch) not in seen
            seen.add((one.candidate.stage, rest, one.candidate.batch))


def test_knob_effects_compare_single_changes_with_probes() -> None:
    searched = _knobs()
    own, other = searched.own(), searched.smallest()
    unread = Candidate(own.stage, ((UNREAD, "b"),), own.batch)
    both = Candidate(own.stage, ((RECOMPUTES, True), (UNREAD, "c")), own.batch)
    bare = Measured({"throughput": 1.0, "latency": 1.0})

    found = best_knob_effects(searched, [(one, _outcome(one)) for one in (own, other, unread, both)])

    assert [(one.path, one.values, one.is_dead) for one in found] == [(UNREAD, ("a", "b"), True)]
    assert best_knob_effects(searched, [(own, bare), (unread, bare)]) == []
    assert not KnobEffect(UNREAD, (0, 1), (("modules", 1.0, 2.0),)).is_dead
    assert not KnobEffect(UNREAD, (0, 1), (), noise=0.5).is_dead
    assert "is not proved" in str(KnobEffect(UNREAD, (0, 1), (), noise=0.5))


def test_knob_effects_ignore_known_keys_except_nvme() -> None:
    bucket, device = "zero_optimization.reduce_bucket_size", "zero_optimization.offload_optimizer.device"
    partition = "activation_checkpointing.partition_activations"
    searched = space(extra={bucket: [10**6, 10**7], partition: [False, True], device: ["none", "nvme"]})
    own = searched.own()
    changed = Candidate(own.stage, ((partition, True),), own.batch)
    larger = Candidate(own.stage, ((bucket, 10**7),), own.batch)

    found = best_knob_effects(searched, [(one, _outcome(one)) for one in (own, changed, larger)])

    assert [(one.path, one.values, one.is_dead) for one in found] == [(partition, (False, True), True)]


def test_pipeline_stages_redivide_batch() -> None:
    def stages(own: int, num_layers: int = 8, **more: Any) -> Space:
        return Space(
            PIPELINE,
            ParallelDims(4, pp=own, is_pipeline=True),
            extra={"hyperparameters.num_stages": [1, 2, 3, 4]},
            hyperparameters={"num_stages": own, "num_layers": num_layers},
            **more,
        )

    searched, stage = stages(2), "hyperparameters.num_stages"
    splits = [
        searched.batch_size_grid.split(position) for position in range(searched.batch_size_grid.last + 1)
    ]
    candidates = [searched.candidate(Structure(1, ((stage, number),)), 1) for number in (1, 2, 3, 4)]
    sizes = [(one.batch.micro_batch_size, one.batch.accumulation) for one in candidates]
    reasons = [searched.illegal_reason(one) for one in candidates]

    assert efficiency(16, 2) == pytest.approx(16 / 17)
    assert [enough_accumulation(number) for number in (1, 2, 4)] == [1, 16, 32]
    assert splits[first_position(splits, 2)].accumulation == 16
    assert searched.first_position(searched.batch_size_grid.last) == first_position(splits, 2)
    assert (sizes[0], sizes[1], sizes[3]) == ((2, 8), (2, 16), (2, 32))
    assert (reasons[0], reasons[1], reasons[3]) == (None, None, None)
    assert reasons[2] is not None
    assert "world_size is 4; expected a multiple of 3" in reasons[2]
    assert "2 pipeline stages (6% idle)" in searched.describe(candidates[1])
    assert {searched.sizes_of(one).dp for one in candidates[:2]} == {4, 2}
    uneven = stages(2, 6)
    reason = "6 layers cannot be divided evenly between 4 pipeline stages"
    assert uneven.illegal_reason(uneven.candidate(Structure(1, ((stage, 4),)), 0)) == reason
    kept = stages(4, 6)
    assert kept.illegal_reason(kept.candidate(Structure(1, ()), 0)) is None
    free = stages(2, free_batch=True)
    assert free.candidate(Structure(1, ((stage, 4),)), 0).batch.accumulation == 32
    assert free.candidate(Structure(1, ()), 0).batch.accumulation == 16
    assert stages(2).stages == (1,)


def test_parallel_axes_are_knobs_with_own_predictions() -> None:
    tensor, sequence = "tensor_parallel.autotp_size", "sequence_parallel_size"
    searched = space(extra={tensor: [1, 2, 3, 4], sequence: [1, 2]})

    def candidate(path: str, size: int, stage: int = 1) -> Candidate:
        return searched.candidate(Structure(stage, ((path, size),)), 2)

    plain, halves, quarters, sequences = (
        candidate(*axis) for axis in ((tensor, 1), (tensor, 2), (tensor, 4), (sequence, 2))
    )
    assert [(one.batch.micro_batch_size, one.batch.accumulation) for one in (plain, halves, quarters)] == [
        (4, 8),
        (4, 16),
        (4, 32),
    ]
    assert {one.batch.train_batch_size for one in (plain, halves, sequences)} == {256}
    assert [searched.illegal_reason(one) for one in (plain, halves, quarters, sequences)] == [None] * 4
    assert "multiple of 3" in (searched.illegal_reason(candidate(tensor, 3)) or "")
    both = searched.candidate(Structure(1, ((sequence, 2), (tensor, 2))), 2)
    assert "Keep one of the two" in (searched.illegal_reason(both) or "")
    # DeepSpeed counts a record once per tensor-parallel rank, so it must compute this size itself.
    assert halves.overwrite()["train_batch_size"] is None
    assert "train_batch_size" not in searched.config(halves)
    assert searched.config(sequences)["train_batch_size"] == 256
    with pytest.raises(ConfigError, match="autotp_size is 2 in your own config"):
        Space(BASE, ParallelDims(8, tp=2), extra={tensor: [1, 2]})

    known = inputs(searched=searched)
    groups = ConfigGroups(searched)
    assert not {path for one, _ in groups.representatives().values() for path, _ in one.settings} & {
        tensor,
        sequence,
    }
    assert list(_structures(groups)) == ["[]"], "no axis has a dry run of its own"
    runs = {key: dataclasses.replace(run, tokens=Line(0.0, 2048.0)) for key, run in known.runs.items()}
    predictor = Predictor(groups, dataclasses.replace(known, runs=runs), "throughput")
    candidates = [plain, halves, quarters, sequences]
    one, two, four, shared = (
        each.memory.median_bytes for each in predictor.predictions(candidates) if each.memory is not None
    )
    assert one > two > four
    assert one > shared
    parts = [predictor.parts(each) for each in candidates]
    # Ranks that share a layer or sequence exchange activations; the compute per rank does not change.
    assert parts[0]["transfer"] < min(part["transfer"] for part in parts[1:])
    assert [part["compute"] for part in parts] == pytest.approx([parts[0]["compute"]] * 4)
