"""Determined's experiment config v0: types, bounds, defaults, lengths.

Source: Determined 0.38.1 schemas/expconf/v0. Fields that mean nothing without Determined's containers are passed through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

from dstrial.config.keys import Dialect, Rule, Section

DEFAULT_PREEMPTION_TIMEOUT_S = 600
"""How long ranks may take to save and end after a request to stop, seconds. Determined gives an hour, in which a hung rank
holds its slots."""


def _rule(*types: str, default: Any = None, **bounds: Any) -> Rule:
    return Rule(types=types, default=default, **bounds)


@dataclasses.dataclass(frozen=True, slots=True)
class SearcherKeys:
    """The keys that the config of one searcher may have."""

    keys: tuple[str, ...] = ()  # with an effect, beside the keys of every searcher
    requires: tuple[str, ...] = ()  # must be given
    is_timed: bool = False  # whether `max_time` and `time_metric` must be given
    is_independent: bool = False  # no trial depends on another: the rest can go on after the search
    # Of keys that no searcher before it had.
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)


_ASHA = ("max_trials", "max_concurrent_trials", "divisor", "stop_once", "train_stragglers")
SEARCHERS: dict[str, SearcherKeys] = {
    "single": SearcherKeys(is_independent=True),
    "random": SearcherKeys(("max_trials", "max_concurrent_trials"), ("max_trials",), is_independent=True),
    "grid": SearcherKeys(("max_concurrent_trials",), is_independent=True),
    "adaptive_asha": SearcherKeys(
        (*_ASHA, "max_rungs", "bracket_rungs", "mode"), ("max_trials",), is_timed=True
    ),
    "async_halving": SearcherKeys((*_ASHA, "num_rungs"), ("max_trials", "num_rungs"), is_timed=True),
}
"""Name -> what its config may have; ``dstrial.search.searcher`` says what runs it."""
ENDED_SEARCHERS = ("custom", "adaptive", "adaptive_simple", "sync_halving")
STORAGE_REQUIRES: dict[str, tuple[str, ...]] = {
    "shared_fs": ("host_path",),
    "directory": ("container_path",),
    "s3": ("bucket",),
    "gcs": ("bucket",),
    "azure": ("container",),
}


def _section(**keys: Rule) -> Rule:
    return Rule(types=("mapping",), section=Section(keys))


_STRING = _rule("string")
_ANY = _rule("any")
_FALSE = _rule("boolean", default=False)
_TRUE = _rule("boolean", default=True)
_COUNT = _rule("integer", minimum=0)
_LENGTH = _rule("integer", "mapping")
_PERIOD = _rule("any", default={"batches": 0})

_SEARCHER = _section(
    name=_STRING,
    metric=_STRING,
    smaller_is_better=_TRUE,
    source_trial_id=_rule("integer"),
    source_checkpoint_uuid=_STRING,
    max_length=_LENGTH,
    max_time=_rule("integer", minimum=1, maximum=10**15),
    time_metric=_STRING,
    max_trials=_rule("integer", minimum=1, maximum=10**6),
    max_concurrent_trials=_rule("integer", default=16, minimum=0, maximum=10**6),
    max_rungs=_rule("integer", default=5, minimum=1, maximum=1000),
    num_rungs=_rule("integer", minimum=1, maximum=1000),
    bracket_rungs=_rule("list", default=[]),
    divisor=_rule("number", default=4, exclusive_minimum=1, maximum=10**6),
    mode=_rule("string", default="standard", enum=("aggressive", "standard", "conservative")),
    stop_once=_FALSE,
    train_stragglers=_ANY,
    **{key: rule for searcher in SEARCHERS.values() for key, rule in searcher.rules.items()},
)

_RESOURCES = _section(
    # Of commands, with which experiments share templates.
    slots=_rule("integer"),
    slots_per_trial=_rule("integer", default=1, minimum=0),
    max_slots=_COUNT,
    priority=_rule("integer", minimum=1, maximum=99),
    weight=_rule("number", default=1, minimum=0),
    resource_pool=_rule("string", default=""),
    devices=_rule("list", default=[]),
    shm_size=_rule("integer", "string"),
    native_parallel=_FALSE,
    is_single_node=_rule("boolean"),
    agent_label=_STRING,
)

_ENVIRONMENT = _section(
    environment_variables=_rule("list", "mapping", default=[]),
    image=_rule("string", "mapping"),
    # Ours; Determined's master refuses it, and takes data.dstrial.requirements.
    requirements=_STRING,
    pod_spec=_ANY,
    ports=_rule("mapping", default={}),
    registry_auth=_ANY,
    force_pull_image=_FALSE,
    add_capabilities=_rule("list", default=[]),
    drop_capabilities=_rule("list", default=[]),
    proxy_ports=_rule("list", default=[]),
)

_STORAGE = _section(
    type=_rule("string", enum=tuple(STORAGE_REQUIRES)),
    # Without Determined's defaults (0, 1, 1): off a cluster no checkpoint is deleted unless the file says so.
    save_experiment_best=_COUNT,
    save_trial_best=_COUNT,
    save_trial_latest=_COUNT,
    host_path=_STRING,
    storage_path=_STRING,
    propagation=_STRING,
    container_path=_STRING,
    checkpoint_path=_STRING,
    tensorboard_path=_STRING,
    bucket=_STRING,
    prefix=_STRING,
    access_key=_STRING,
    secret_key=_STRING,
    endpoint_url=_STRING,
    container=_STRING,
    connection_string=_STRING,
    account_url=_STRING,
    credential=_STRING,
)

EXPERIMENT = Section(
    {
        "name": _STRING,
        "description": _STRING,
        "entrypoint": _rule("string", "list"),
        "hyperparameters": _rule("mapping", default={}),
        "searcher": _SEARCHER,
        "resources": _RESOURCES,
        "max_restarts": _rule("integer", default=5, minimum=0),
        "min_validation_period": _PERIOD,
        "min_checkpoint_period": _PERIOD,
        "scheduling_unit": _rule("integer", default=100, minimum=1),
        "records_per_epoch": _rule("integer", default=0, minimum=0),
        "perform_initial_validation": _FALSE,
        "checkpoint_policy": _rule("string", default="best", enum=("best", "all", "none")),
        "checkpoint_storage": _STORAGE,
        "environment": _ENVIRONMENT,
        "bind_mounts": _rule("list", default=[]),
        "data": _rule("mapping", default={}),
        "profiling": _section(
            enabled=_FALSE,
            begin_on_batch=_rule("integer", default=0, minimum=0),
            end_after_batch=_COUNT,
            sync_timings=_TRUE,
        ),
        "reproducibility": _section(
            experiment_seed=_rule("integer", default=0, minimum=0, maximum=2**32 - 1)
        ),
        "labels": _rule("list", default=[]),
        "log_policies": _rule("list", default=[]),
        "retention_policy": _section(log_retention_days=_rule("integer", minimum=-1, maximum=32767)),
        "preemption_timeout": _rule("integer", minimum=1),
        "workspace": _rule("string", default=""),
        "project": _rule("string", default=""),
        "optimizations": _section(
            aggregation_frequency=_rule("integer", default=1, minimum=1),
            average_aggregated_gradients=_TRUE,
            average_training_metrics=_TRUE,
            gradient_compression=_FALSE,
            mixed_precision=_rule("string", default="O0"),
            tensor_fusion_threshold=_rule("integer", default=64),
            tensor_fusion_cycle_time=_rule("integer", default=1),
            auto_tune_tensor_fusion=_FALSE,
            grad_updates_size_file=_STRING,
        ),
        "integrations": _ANY,
        "security": _ANY,
        "slurm": _rule("mapping", default={}),
        "pbs": _rule("mapping", default={}),
        "tensorboard_storage": _ANY,
        "data_layer": _ANY,
        "debug": _FALSE,
        "internal": _ANY,
    }
)


DIALECT = Dialect(name="the experiment config", null_is_absent=True)


def section_of(key: str) -> Section:
    """Return the keys inside a mapping of the experiment config."""
    section = EXPERIMENT.keys[key].section
    assert section is not None, key
    return section


Unit = Literal["batches", "epochs", "records"]

UNITS: tuple[Unit, ...] = ("batches", "epochs", "records")


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """A number of batches (optimizer steps), epochs or records."""

    value: int  # 0 means "never" where a period is asked for
    unit: Unit

    @classmethod
    def from_config(cls, value: int | Mapping[str, Any]) -> Length:
        """Read ``100`` (batches) or ``{epochs: 2}``, which :func:`is_length` accepts."""
        if isinstance(value, Mapping):
            ((unit, number),) = value.items()
            return cls(int(number), cast(Unit, unit))
        return cls(int(value), "batches")


def is_length(value: object, *, allow_integer: bool) -> bool:
    """Say whether a value is ``{batches|epochs|records: n}`` with n of at least 0."""
    # A bare integer, where it is allowed, means batches.
    if isinstance(value, Mapping):
        if len(value) != 1:
            return False
        ((unit, number),) = value.items()
        return unit in UNITS and is_count(number)
    return allow_integer and is_count(value)


def is_count(value: object) -> bool:
    """Say whether a value is an integer of at least 0 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
