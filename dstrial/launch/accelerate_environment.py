"""Set the environment variables of ``accelerate launch`` for an experiment.

``accelerate.Accelerator()`` reads from environment variables whether to use DeepSpeed, and the path of its JSON config. The path
is that of a copy of the experiment's DeepSpeed config with the overwrites applied; the user's file is not modified. Source:
accelerate 1.15 ``utils/launch.py:prepare_deepspeed_cmd_env`` sets the variables; ``utils/dataclasses.py`` and ``state.py`` read
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.batch import BATCH_KEYS, solve_batch
from dstrial.config.deepspeed_source import MAIN_KEY, DeepSpeedSource, read_deepspeed
from dstrial.config.diagnostics import Diagnostics
from dstrial.config.parallel_dims import ParallelDims, batch_replicas
from dstrial.resume.metadata import SavedRun, given_sizes
from dstrial.resume.plan import with_kept_batch

USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable that makes ``Accelerator()`` use DeepSpeed if it is ``true``."""

CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Environment variable with the path of the JSON that ``Accelerator()`` passes to DeepSpeed."""

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
"""Environment variable that replaces ``"auto"`` in ``fp16.enabled`` and ``bf16.enabled``."""

ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
"""Environment variable with the accumulation steps of ``accelerator.accumulate``."""

_FILE_NAME = "deepspeed_config.json"  # of the effective DeepSpeed config


def accelerate_variables(
    hyperparameters: Mapping[str, Any],
    *,
    num_ranks: int,
    directory: Path,
    environ: Mapping[str, str],
    context_dir: Path | None = None,
    extents: Mapping[str, Any] | None = None,
    resumed: SavedRun | None = None,
) -> dict[str, str]:
    """Write a script's effective DeepSpeed config; return the ranks' variables for it.

    Args:
        hyperparameters: hyperparameters of the trial.
        num_ranks: ranks of the job, on all machines.
        directory: existing directory for the effective config; must exist until the ranks end.
        environ: the ranks' other variables; a variable in ``environ`` is left out of the result.
        context_dir: base of the config's relative path; the current directory if None.
        extents: ``data.dstrial`` of the experiment config, which may have the parallel sizes of a replica.
        resumed: run whose total batch size is kept; None for a new run.

    Returns:
        Variable -> value; empty if the trial has no DeepSpeed config or the user has disabled DeepSpeed.

    Raises:
        ConfigError: the DeepSpeed config cannot be read, or its batch sizes do not fit these ranks.
    """
    if hyperparameters.get(MAIN_KEY) is None or environ.get(USE_DEEPSPEED, "true").lower() != "true":
        return {}
    findings = Diagnostics({}, "experiment config")
    source = read_deepspeed(
        MAIN_KEY, hyperparameters, context_dir or Path(), {}, "experiment config", findings
    )
    findings.raise_if_any()
    assert source is not None
    effective = effective_config(source, _sizes(num_ranks, extents), resumed)
    path = directory / _FILE_NAME
    path.write_text(json.dumps(effective, indent=2) + "\n", encoding="utf-8")
    variables = {USE_DEEPSPEED: "true", CONFIG_FILE: str(path)}
    precision = next((name for name in ("fp16", "bf16") if _is_enabled(effective.get(name))), None)
    if precision is not None:
        variables[MIXED_PRECISION] = precision
    steps = effective.get(BATCH_KEYS[2])
    if isinstance(steps, int):
        variables[ACCUMULATION] = str(steps)
    return {name: value for name, value in variables.items() if name not in environ}


def effective_config(
    source: DeepSpeedSource, sizes: ParallelDims, resumed: SavedRun | None
) -> dict[str, Any]:
    """Return a DeepSpeed config that Accelerate accepts for these ranks.

    Accelerate sets a missing ``gradient_accumulation_steps`` to 1, regardless of ``train_batch_size``, and rejects a config
    without ``zero_optimization``. So all three batch sizes are computed if ``train_batch_size`` is given. Otherwise
    ``"auto"`` is not changed: Accelerate replaces it by the script's value.

    Args:
        source: the experiment's DeepSpeed config.
        sizes: the parallel dimensions of the job.
        resumed: run whose total batch size is kept; None for a new run.

    Raises:
        ConfigError: the batch sizes do not fit these ranks.
    """
    merged: dict[str, Any] = source.merged
    if resumed is not None and resumed.keeps_batch and resumed.engines:
        merged = with_kept_batch(source, resumed, sizes, [], is_main=True)
    total, micro, steps = given_sizes(merged)
    if total is not None:
        solution = solve_batch(total, micro, steps, batch_replicas(merged, sizes))
        merged = {**merged, **{key: getattr(solution, key) for key in BATCH_KEYS}}
    return {"zero_optimization": {"stage": 0}, **merged}


def _sizes(num_ranks: int, extents: Mapping[str, Any] | None) -> ParallelDims:
    try:
        return ParallelDims(1).with_section(extents).on(num_ranks)
    except ValueError:
        # The check of the experiment config reports this error with file and line.
        return ParallelDims(num_ranks)


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True
