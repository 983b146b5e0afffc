"""What a command line of dsat says, as values. Parses and checks nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.methods import METHODS

_NOT_SEARCHED = frozenset(
    {
        "budget",
        "output",
        "fresh",
        "local",
        "run_full_experiment",
        "given",
        "trial_timeout",
        "no_worker",
        "own",
        "slots",
        "per_machine",
    }
)
"""Flags that do not decide what a search asks for; another value of them goes on with it."""
_DESCRIBES = frozenset({"sample_batch", "trust_code"})
"""Flags of methods that predict."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """What the command line of a search says, defaults included; help: ``cli``."""

    search_method: str
    config_path: str
    model_dir: str
    include: Sequence[str]
    max_trials: int
    max_slots: int | None
    max_concurrent_trials: int
    metric: str
    run_full_experiment: bool
    zero_stages: Sequence[int]
    start_profile_step: int
    end_profile_step: int
    random_seed: int
    search_runner_config: str | None
    max_search_runner_restarts: int
    budget: float | None
    train_batch_size: int | None
    free_batch: bool
    space: str | None
    output: str | None
    local: bool
    fresh: bool
    no_worker: bool
    no_gates: bool
    trial_timeout: float
    measure_seconds: float
    sample_batch: int | str | None = None
    trust_code: bool = False
    slots: int | None = None  # ``slots`` and ``per_machine``: of ``plan`` only
    per_machine: int | None = None
    # flags of the method alone, by names with underscores
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()  # names of the flags that were given

    def deciding(self) -> dict[str, Any]:
        """Return the flags that decide what is searched, by name."""
        left_out = _NOT_SEARCHED if METHODS[self.search_method].predicts else _NOT_SEARCHED | _DESCRIBES
        names = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        return {**{name: getattr(self, name) for name in names}, **self.own}


@dataclasses.dataclass(frozen=True, slots=True)
class PlanFlags:
    search: SearchFlags  # a search by prediction with the values that ``plan`` was given
    device: str | None
    device_memory: int | None  # bytes; None for that of the device
    per_machine: int
