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
    """What the command line of a search says, defaults included.

    Attributes:
        search_method: name of the method.
        config_path: of the experiment config.
        model_dir: the model definition.
        include: further files or directories for the trials.
        max_trials: most trials, the first one included.
        max_slots: most slots at the same time; None for no limit.
        max_concurrent_trials: most trials at the same time.
        metric: what is searched for.
        run_full_experiment: whether the experiment is then trained with what is best.
        zero_stages: to try.
        start_profile_step: first step that may be measured.
        end_profile_step: a trial trains at least one step more.
        random_seed: of the search.
        search_runner_config: accepted, without effect.
        max_search_runner_restarts: accepted, without effect.
        budget: seconds after which no trial begins; None for no limit.
        train_batch_size: global batch to keep instead of the config's own.
        free_batch: whether the global batch follows the micro batch.
        space: file of further paths and values.
        output: directory of the search; None for one by its name.
        local: whether trials run on this machine, without a master.
        fresh: whether a new search is begun.
        no_worker: whether ranks are launched anew for every configuration.
        no_gates: whether duplicates, the illegal and the hopeless are measured, too.
        trial_timeout: longest time of a trial of which nothing is known, seconds.
        measure_seconds: most seconds of timed steps in a trial.
        sample_batch: how many first batches are looked at, or the file of one; None for the default.
        trust_code: whether that file may run code.
        slots: ranks in all instead of the config's own; only ``plan`` says it.
        per_machine: devices of one machine; only ``plan`` says it.
        own: flags of the method alone, by their names with underscores.
        given: names of the flags that were given.
    """

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
    slots: int | None = None
    per_machine: int | None = None
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def deciding(self) -> dict[str, Any]:
        """Return the flags that decide what is searched, by name."""
        left_out = _NOT_SEARCHED if METHODS[self.search_method].predicts else _NOT_SEARCHED | _DESCRIBES
        names = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        return {**{name: getattr(self, name) for name in names}, **self.own}


@dataclasses.dataclass(frozen=True, slots=True)
class PlanFlags:
    """What the command line of ``plan`` says.

    Attributes:
        search: a search by prediction that differs in nothing but what ``plan`` was given.
        device: name of the device; None if none was named.
        device_memory: of one device, bytes; None for that of the device.
        per_machine: devices of one machine.
    """

    search: SearchFlags
    device: str | None
    device_memory: int | None
    per_machine: int
