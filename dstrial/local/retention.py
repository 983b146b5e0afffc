"""Which checkpoints are kept by Determined's ``checkpoint_storage`` rules. Pure.

A run off any cluster is one trial, so "best of the trial" and "best of the experiment" rank the same
checkpoints. This module deletes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

_DEFAULTS = {"save_trial_latest": 1, "save_trial_best": 1, "save_experiment_best": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class KeepPolicy:
    """How many checkpoints of a run to keep.

    Attributes:
        num_latest: how many of those with the most batches; the newest is kept even at 0.
        num_best: how many of those with the best searcher metric, counted by their own.
    """

    num_latest: int = 1
    num_best: int = 1

    @classmethod
    def from_config(cls, checkpoint_storage: Mapping[str, object] | None) -> KeepPolicy | None:
        """Read the experiment config's ``checkpoint_storage``; None keeps everything.

        None comes of a section without any ``save_…`` field: nobody has asked to delete anything. Where one of the three is
        given, the others have Determined's defaults (latest 1, trial best 1, experiment best 0) if missing or None. Those that
        are given have been validated as integers of at least 0.
        """
        fields = checkpoint_storage or {}
        given = {key: fields[key] for key in _DEFAULTS if fields.get(key) is not None}
        if not given:
            return None
        numbers = {**_DEFAULTS, **given}
        latest, trial_best, experiment_best = (
            value if isinstance(value, int) else _DEFAULTS[key] for key, value in numbers.items()
        )
        return cls(num_latest=latest, num_best=max(trial_best, experiment_best))


def checkpoints_to_delete(
    checkpoints: Sequence[tuple[str, int]],
    validations: Mapping[int, float],
    policy: KeepPolicy,
    *,
    smaller_is_better: bool,
) -> list[str]:
    """Decide which checkpoints the policy does not keep.

    Args:
        checkpoints: uuid and ``steps_completed`` of each complete checkpoint, oldest first.
        validations: ``steps_completed`` -> searcher metric reported there. A checkpoint without one,
            or with NaN, is never among the best.
        policy: how many to keep.
        smaller_is_better: which way the searcher metric is compared; of equals the earlier is better.

    Returns:
        uuids to delete, oldest first; never the newest checkpoint.
    """
    if not checkpoints:
        return []
    kept = {uuid for uuid, _ in checkpoints[-max(1, policy.num_latest) :]}
    measured = [
        (validations[steps], steps, uuid)
        for uuid, steps in checkpoints
        if not math.isnan(validations.get(steps, math.nan))
    ]
    measured.sort(key=lambda entry: (entry[0] if smaller_is_better else -entry[0], entry[1]))
    kept |= {uuid for _, _, uuid in measured[: policy.num_best]}
    return [uuid for uuid, _ in checkpoints if uuid not in kept]
