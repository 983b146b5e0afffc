"""Check an experiment config against the checkpoint that its run goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import Findings
from dstrial.config.experiment_config.check import parallel_extent
from dstrial.config.parallel_dims import DIM_KEYS, ParallelDims
from dstrial.errors import ConfigError
from dstrial.resume.batch import engine_of, in_words, keep_batch
from dstrial.resume.metadata import SavedRun
from dstrial.resume.rules import resume_problems


def with_kept_batch(
    found: DeepSpeedSource, resumed: SavedRun, sizes: ParallelDims, notes: list[str], *, is_main: bool
) -> dict[str, Any]:
    """Return a merged DeepSpeed config with the batch of the run's checkpoint.

    Args:
        found: the config.
        resumed: the checkpoint, of the same run.
        sizes: the ranks now, and how they are divided.
        notes: receives how the batch is shared, where that has changed.
        is_main: whether it is the experiment's main config.
    """
    engine = engine_of(found.merged, resumed, is_main=is_main)
    if engine is None:
        return found.merged
    try:
        solution = keep_batch(found.merged, engine, sizes.dp, checkpoint=resumed.checkpoint)
    except ConfigError:
        # What is wrong is said by check_resumption; the rest of the config is checked with sizes of which nothing is.
        return {**found.merged, **dict.fromkeys(BATCH_KEYS, 1), BATCH_KEYS[0]: sizes.dp}
    if (engine.data_parallel_size, engine.micro_batch_size) != (
        solution.data_parallel_size,
        solution.train_micro_batch_size_per_gpu,
    ):
        notes.append(f"{found.label}: checkpoint {resumed.checkpoint}: {in_words(engine, solution)}")
    return {**found.merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}


def check_resumption(
    raw: Mapping[str, Any],
    resumed: SavedRun,
    slots: int,
    slots_key: str,
    checks: Sequence[tuple[DeepSpeedSource, CheckResult]],
    findings: Findings,
) -> None:
    """Record what keeps a checkpoint from going on with an experiment config.

    Args:
        raw: the config with defaults.
        resumed: the checkpoint.
        slots: the number of slots; 0 means one rank on the CPU.
        slots_key: where that number stands.
        checks: the experiment's DeepSpeed configs, the main one first.
        findings: receives the problems.
    """
    ignored = Findings({}, "")
    found = resume_problems(
        resumed,
        num_slots=max(slots, 1),
        extents={key: parallel_extent(raw, key, ignored) for key in DIM_KEYS},
        configs=[source.merged for source, _ in checks],
        slots_key=slots_key if slots_key == "--slots" else findings.place(slots_key),
        where=[_places(source) for source, _ in checks],
    )
    findings.problems.extend(problem for problem in found if problem not in findings.problems)


def _places(source: DeepSpeedSource) -> dict[str, str]:
    findings = Findings(source.lines, source.label)
    return {key: findings.place(key) for key in BATCH_KEYS}
