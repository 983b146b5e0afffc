"""From which checkpoint an Accelerate loop goes on, and with which batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dstrial.config import overwrite_deepspeed_config
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.saved_run import RESUME_VARIABLE, given_settings
from dstrial.errors import CheckpointNotFoundError, ConfigError
from dstrial.trial.runtime import TrialRuntime


def checkpoint_to_resume(runtime: TrialRuntime, info: Any) -> str | None:
    """Return the checkpoint that a run goes on from; None for a new one.

    Args:
        runtime: of the trial.
        info: the cluster's; None off a cluster.

    Raises:
        CheckpointNotFoundError: the newest one of a run was asked for, and it has none.
    """
    asked = os.environ.get(RESUME_VARIABLE)
    if info is not None:
        latest: str | None = info.latest_checkpoint
        return latest or (asked if runtime.is_mirrored else None)
    if asked != "latest":
        return asked or None
    newest = runtime.core.checkpoint.newest()
    if newest is None:
        raise CheckpointNotFoundError(
            f"the run {runtime.core.run_directory.path} has no complete checkpoint; expected one to resume from. Start a "
            "new run, without resuming."
        )
    return str(newest.uuid)


def settings_as_given(runtime: TrialRuntime, engine_idx: int) -> dict[str, Any]:
    """Return an engine's settings as the experiment gives them, with which a later resume compares its config.

    What Accelerate was given has all sizes solved for these ranks, or taken from the script.
    """
    given = runtime.given_hparams or {}
    source = given.get(MAIN_KEY)
    own: dict[str, Any] = runtime.given_settings[engine_idx]
    if engine_idx or not isinstance(source, (str, Mapping)):
        return own
    try:
        merged = overwrite_deepspeed_config(
            source if isinstance(source, str) else dict(source),
            dict(given.get("overwrite_deepspeed_args") or {}),
        )
    except ConfigError:
        return own
    kinds = {key: value for key, value in own.items() if isinstance(value, str)}
    return {**kinds, **given_settings(merged)}


def micro_batch_before(runtime: TrialRuntime) -> int | None:
    """Return the micro batch of the checkpoint that this very run goes on from; None for a new run."""
    resumed = runtime.resumed
    return None if resumed is None or not resumed.saved.engines else resumed.saved.engines[0].micro_batch_size
