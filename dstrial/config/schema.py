"""Table of experiment config keys: Determined's version 0 and ``data.dstrial``.

For each key the table has types, bounds, default and description. The config check, the reference page and the JSON Schema
(``dstrial check --schema``) use the table. Source: Determined 0.38.1 schemas/expconf/v0. Fields that only affect Determined's
containers are passed through.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import re2

from dstrial.config.keys import Dialect, Rule, Section, json_schema

DEFAULT_PREEMPTION_TIMEOUT_S = 600
"""Grace period of ranks to save and exit after a stop request, in seconds. With Determined's default of an hour, a hung rank
keeps its slots too long."""

_MAX_PATTERN_CHARS = 2000
_MAX_PATTERN_BYTES = 2**23
"""Memory limit of one compiled pattern, in bytes; RE2's default."""

Unit = Literal["batches", "epochs", "records"]

UNITS: tuple[Unit, ...] = ("batches", "epochs", "records")


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """A number of batches (optimizer steps), epochs or records."""

    value: int  # 0 means "never" for a period
    unit: Unit

    @classmethod
    def from_config(cls, value: int | Mapping[str, Any]) -> Length:
        """Parse a validated value: ``100`` (batches) or ``{epochs: 2}``."""
        if isinstance(value, Mapping):
            ((unit, number),) = value.items()
            return cls(int(number), cast(Unit, unit))
        return cls(int(value), "batches")


_UNITS = "{batches: n}, {epochs: n}, {records: n}"


def _check_length(value: object) -> str | None:
    given = value if isinstance(value, Mapping) else {"batches": value}
    if len(given) == 1 and all(key in UNITS and _is_count(one) and one for key, one in given.items()):
        return None
    return f"a number of batches, or one of {_UNITS}, with n of at least 1"


def _check_period(value: object) -> str | None:
    if isinstance(value, Mapping) and len(value) == 1:
        ((unit, number),) = value.items()
        if unit in UNITS and _is_count(number):
            return None
    return f"one of {_UNITS} with n of at least 0"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def compile_pattern(text: str) -> Any:
    """Compile an RE2 pattern in multi-line mode; the result has ``search(str)``.

    Python's ``re`` backtracks: ``(a+)+$`` and a line of forty letters would block the master for hours. An invalid pattern raises
    ValueError. Syntax: https://github.com/google/re2/wiki/Syntax.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_PATTERN_BYTES
    try:
        return re2.compile(f"(?m){text}", options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        raise ValueError(
            reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        ) from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate") from None


def _check_pattern(value: Any) -> str | None:
    if isinstance(value, str) and len(value) > _MAX_PATTERN_CHARS:
        return f"at most {_MAX_PATTERN_CHARS} characters"
    try:
        if not isinstance(value, str):
            raise ValueError("not a string")
        compile_pattern(value)
    except ValueError as error:
        return f"a regular expression of RE2 ({error})"
    return None


def _check_action(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else value
    return None if kind in _POLICY_ACTIONS else " or ".join(_POLICY_ACTIONS)


def _check_policy(value: Any) -> str | None:
    has_name = isinstance(value, Mapping) and bool({"pattern", "name"} & value.keys())
    return None if has_name else "a mapping with pattern or name"


def _check_absolute(value: Any) -> str | None:
    return "an absolute path" if isinstance(value, str) and not value.startswith("/") else None


def _check_digest(value: Any) -> str | None:
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return None
    return "the SHA-256 of a checkpoint's manifest, 64 hexadecimal digits, as the refusal of the checkpoint names it"


def _rule(about: str, *types: str, **fields: Any) -> Rule:
    return Rule(types=types, about=about, **fields)


def _text(about: str, **fields: Any) -> Rule:
    return _rule(about, "string", **fields)


def _count(about: str, **fields: Any) -> Rule:
    return _rule(about, "integer", **{"minimum": 0, **fields})


def _flag(about: str, *, default: bool | None = False) -> Rule:
    return _rule(about, "boolean", default=default)


def _switch(about: str, *, default: bool) -> Rule:
    return _rule(about, "boolean", default=default, fix="Write true, or leave it out.")


def _section(about: str, **keys: Rule) -> Rule:
    return _rule(about, "mapping", section=Section(keys))


def _list_of(about: str, item: Rule, **fields: Any) -> Rule:
    return _rule(about, "list", default=[], items=item, **fields)


def _item(required: tuple[str, ...], **keys: Rule) -> Rule:
    expected = f"a mapping with {' and '.join(required)}"
    return Rule(
        types=("mapping",),
        section=Section(keys, required=required),
        expected=expected,
        fix=f"Write {{{required[0]}: …}}.",
    )


_ANY = "any"
_LENGTH = Section({unit: Rule(types=("integer",), minimum=0) for unit in UNITS}, fills_in=False)
_UNUSED = "without effect: dstrial starts no containers"
_KEPT = "without effect in dstrial; accepted because Determined clusters use the key"
_WORD = Rule(types=("string",), fix="Put it into quotes.")


@dataclasses.dataclass(frozen=True, slots=True)
class SearcherKeys:
    """The config keys of one searcher, and properties of its trials."""

    keys: tuple[str, ...] = ()  # in addition to the keys of every searcher
    requires: tuple[str, ...] = ()  # required keys
    is_timed: bool = False  # whether `max_time` and `time_metric` are required
    is_independent: bool = (
        False  # whether no trial depends on another, so that trials can continue after the search
    )


# Keys of both searchers that stop trials early.
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
"""Name of a searcher -> its config keys; ``dstrial.search.searcher`` maps names to implementations."""
ENDED_SEARCHERS = ("custom", "adaptive", "adaptive_simple", "sync_halving")
"""Searchers of former releases of Determined."""

STORAGE_REQUIRES: dict[str, tuple[str, ...]] = {
    "shared_fs": ("host_path",),
    "directory": ("container_path",),
    "s3": ("bucket",),
    "gcs": ("bucket",),
    "azure": ("container",),
}
"""Type of a checkpoint storage -> its required fields."""

_POLICY_ACTIONS = ("cancel_retries", "exclude_node")

SEARCHER_COMMON: dict[str, Rule] = {
    "name": _text(f"search method: `{'`, `'.join(SEARCHERS)}`"),
    "metric": _text("validation metric that decides which checkpoint and which trial is best"),
    "smaller_is_better": _flag("whether the lowest value of the metric is the best", default=True),
    "source_trial_id": _rule("ID of the trial from whose latest checkpoint all trials start", "integer"),
    "source_checkpoint_uuid": _text("UUID of the checkpoint from which all trials start"),
    "max_length": _rule(
        "how long a trial trains: a number of batches, or `{batches: n}`, `{epochs: n}`, `{records: n}`",
        "integer",
        "mapping",
        section=_LENGTH,
        check=_check_length,
        fix="Write {batches: 1000}, for example.",
    ),
    "max_time": _count(
        "maximum training length of a trial, in the unit `time_metric`", minimum=1, maximum=10**15
    ),
    "time_metric": _text("unit of `max_time`: `batches`, `epochs`, or a metric that the trial reports"),
}
"""Keys common to all searchers."""

_SEARCHER = _section(
    "number of trials and length of each trial",
    **SEARCHER_COMMON,
    max_trials=_count("number of trials", minimum=1, maximum=10**6),
    max_concurrent_trials=_count(
        "maximum number of trials at a time; 0 for no limit", default=16, maximum=10**6
    ),
    max_rungs=_count(
        "maximum number of rungs (lengths at which trials may stop) of an ASHA bracket",
        default=5,
        minimum=1,
        maximum=1000,
    ),
    num_rungs=_count("number of rungs of `async_halving`", minimum=1, maximum=1000),
    bracket_rungs=_list_of(
        "number of rungs of each bracket; overrides `mode`",
        _count(
            "",
            minimum=1,
            maximum=1000,
            fix="List the number of rungs of each bracket, or leave bracket_rungs out.",
        ),
    ),
    divisor=_rule(
        "reduction factor: 1 / `divisor` of the trials continue after a rung",
        "number",
        default=4,
        exclusive_minimum=1,
        maximum=10**6,
    ),
    mode=_text(
        "how aggressively trials are stopped early",
        default="standard",
        enum=("aggressive", "standard", "conservative"),
    ),
    stop_once=_flag(_KEPT),
    train_stragglers=_rule(_KEPT, _ANY),
)

RESOURCE_KEYS = {
    "slots": _rule("slots of a command; without effect in an experiment", "integer"),
    "slots_per_trial": _count("ranks of a trial, one per device; 0 for one rank on the CPU", default=1),
    "max_slots": _count("maximum number of slots of all trials together"),
    "priority": _count("priority; a lower number is scheduled first", minimum=1, maximum=99),
    "weight": _rule("without effect", "number", default=1, minimum=0),
    "resource_pool": _text("name of the resource pool", default=""),
    "devices": _rule(_UNUSED, "list", default=[]),
    "shm_size": _rule(_UNUSED, "integer", "string"),
    "native_parallel": _flag("without effect"),
    "is_single_node": _flag("whether all ranks of a trial run on one host", default=None),
    "agent_label": _text("without effect"),
}
"""Keys of `resources`, of experiments and of commands."""

_ENVIRONMENT = _section(
    "environment of the trial's processes",
    environment_variables=_rule(
        "list of `NAME=value`, or a mapping with such a list per device type (`cpu`, `cuda`, `rocm`)",
        "list",
        "mapping",
        default=[],
    ),
    image=_rule(_UNUSED, "string", "mapping"),
    pod_spec=_rule(_UNUSED, _ANY),
    ports=_rule(_UNUSED, "mapping", default={}),
    registry_auth=_rule(_UNUSED, _ANY),
    force_pull_image=_flag(_UNUSED),
    add_capabilities=_rule(_UNUSED, "list", default=[]),
    drop_capabilities=_rule(_UNUSED, "list", default=[]),
    proxy_ports=_list_of(
        "ports of the trial that the master proxies",
        _item(
            ("proxy_port",),
            proxy_port=_count("port that the trial listens on", minimum=1, maximum=65535),
            proxy_tcp=_flag("whether to forward raw TCP instead of HTTP"),
            unauthenticated=_flag("without effect: the proxy always requires a token"),
            default_service_id=_flag(
                "whether the address `/proxy/TASK/`, which has no port, leads to this port"
            ),
        ),
    ),
)

_SAVED = "number of {} checkpoints to keep; unless given, a master uses its own setting, and runs without a master keep all"
_STORAGE = _section(
    "storage of checkpoints",
    type=_text("kind of storage; the master's own unless given", enum=tuple(STORAGE_REQUIRES)),
    # Not Determined's defaults (0, 1, 1): without a master, checkpoints are deleted only if the config asks for it.
    save_experiment_best=_count(_SAVED.format("the experiment's best")),
    save_trial_best=_count(_SAVED.format("each trial's best")),
    save_trial_latest=_count(_SAVED.format("each trial's latest")),
    host_path=_text("storage directory, for `shared_fs`", check=_check_absolute, fix="Write the full path."),
    storage_path=_text("directory below `host_path`"),
    propagation=_text(_UNUSED),
    container_path=_text(
        "storage directory, for `directory`", check=_check_absolute, fix="Write the full path."
    ),
    checkpoint_path=_text("directory of checkpoints below `host_path`"),
    tensorboard_path=_text("directory of TensorBoard's files below `host_path`"),
    bucket=_text("name of the bucket, for `s3` and `gcs`"),
    prefix=_text("prefix of object names"),
    access_key=_text("access key ID, for `s3`"),
    secret_key=_text("secret access key, for `s3`"),
    endpoint_url=_text("address of an S3-compatible server other than AWS, for `s3`"),
    container=_text("name of the container, for `azure`"),
    connection_string=_text("connection string, for `azure`"),
    account_url=_text("address of the account, for `azure`; replaces `connection_string`"),
    credential=_text("credential for `account_url`, for `azure`"),
)

# Arguments of the rules for numbers of ranks or slots.
_EXTENT: dict[str, Any] = {"minimum": 1, "fix": "Set it to 1 or more."}
DSTRIAL = Section(
    {
        "pipeline_stages": _count(
            "number of stages of the `PipelineModule`; used by `dstrial check` and to compute batch sizes",
            **_EXTENT,
        ),
        "model_parallel_size": _count(
            "number of ranks that share each layer; used by `dstrial check` and to compute batch sizes",
            **_EXTENT,
        ),
        "min_slots": _count("minimum number of slots on which a trial may run", **_EXTENT),
        "max_slots": _count("maximum number of slots on which a trial may run", **_EXTENT),
        "resize_period": _rule(
            "seconds that a trial runs before it is restarted on more slots",
            "number",
            default=600.0,
            exclusive_minimum=0,
            expected="a number of seconds above 0",
            fix="Write 600 for ten minutes.",
        ),
        "background_saving": _switch(
            "whether training continues while checkpoints are written", default=True
        ),
        "save_frozen_parameters": _switch("whether checkpoints contain frozen parameters", default=True),
        "override_optimizer": _switch(
            "whether the optimizer settings of this config replace those of a loaded checkpoint",
            default=False,
        ),
        "resume_data": _text(
            "how a loader other than `dstrial.DataLoader` resumes: at its saved position (`exact`), by reading its data "
            "again up to the position (`reread`), or, on another number of replicas, from the start of the data (`restart`)",
            default="exact",
            enum=("exact", "reread", "restart"),
        ),
        "trust_checkpoint_code": _text(
            "SHA-256 of the manifest of a checkpoint whose pickles may run code; same effect as `--trust-code`",
            check=_check_digest,
            fix="Copy it from there: only these very files are trusted then.",
        ),
        "non_finite": _text(
            "action after `non_finite_patience` consecutive reports without a finite loss",
            default="fail",
            enum=("fail", "warn", "ignore"),
        ),
        "non_finite_patience": _count(
            "number of consecutive reports without a finite loss that trigger `non_finite`",
            default=3,
            minimum=1,
        ),
        "stall_timeout": _rule(
            "a trial is stalled if a batch, validation or checkpoint takes this many seconds more than the longest so far",
            "number",
            default=120.0,
            exclusive_minimum=0,
            expected="a number of seconds above 0",
        ),
        "stall_action": _text("action if the trial is stalled", default="report", enum=("report", "restart")),
        "determined_imports": _switch(
            "whether imports of `determined.pytorch` resolve to dstrial's classes", default=True
        ),
        "warm": _switch(
            "whether trials may start as forks of a process that has imported torch", default=True
        ),
        "telemetry": _switch("whether throughput and memory are reported", default=True),
        "requirements": _text(
            "pip requirements file in the model definition, installed before the trial starts",
            fix="Write requirements.txt, for example.",
            expected="a path in the model definition",
        ),
        "loggers": _rule(
            "experiment trackers that get the metrics: `wandb`, `mlflow`, or a mapping with options",
            _ANY,
        ),
    },
    fills_in=False,
)
"""The section ``data.dstrial``: dstrial's own settings, which Determined's master passes through."""

_WEBHOOKS = Section(
    {
        "webhook_id": _list_of(
            "IDs of webhooks to trigger", Rule(types=("integer",), fix="Write [1], for example.")
        ),
        "webhook_name": _list_of(
            "names of webhooks to trigger", Rule(types=("string",), fix="Write [NAME].")
        ),
        "exclude": _flag("if true, the experiment triggers no webhook"),
    },
    fills_in=False,
)

_POLICY = Rule(
    types=("mapping",),
    check=_check_policy,
    fix="Write {pattern: '.*error.*'}.",
    section=Section(
        {
            "name": _text("name of a default policy to replace (`CUDA OOM`, `ECC Error`), or a new name"),
            "pattern": _text(
                "regular expression in RE2 syntax",
                check=_check_pattern,
                fix="Correct the pattern; RE2 has no look-around and no back-references.",
            ),
            "action": _rule(
                "`cancel_retries`: do not restart the trial after a failure; `exclude_node`: do not restart it on this node",
                _ANY,
                check=_check_action,
                fix="Write {type: cancel_retries}.",
            ),
        },
        fills_in=False,
    ),
)

# Arguments of the rules for periods.
_PERIOD: dict[str, Any] = {
    "section": _LENGTH,
    "default": {"batches": 0},
    "check": _check_period,
    "fix": "Write {batches: 100}, for example.",
}

EXPERIMENT = Section(
    {
        "name": _text("name of the experiment; the file's name unless given"),
        "description": _text("free text"),
        "entrypoint": _rule(
            "`module:Class` of a trial, or the command that each trial runs",
            "string",
            "list",
            items=Rule(types=("string",), expected="a string", fix="Quote every word."),
        ),
        "hyperparameters": _rule(
            "hyperparameters of the trials: constants and search spaces", "mapping", default={}
        ),
        "searcher": _SEARCHER,
        "resources": _section("resources of a trial", **RESOURCE_KEYS),
        "max_restarts": _count("maximum number of restarts of a trial after failures", default=5),
        "min_validation_period": _rule(
            "training length between two validations; 0: validate only at the end", "mapping", **_PERIOD
        ),
        "min_checkpoint_period": _rule(
            "training length between two checkpoints; 0: save only at the end", "mapping", **_PERIOD
        ),
        "scheduling_unit": _count("batches between two training reports", default=100, minimum=1),
        "records_per_epoch": _count(
            "number of records in an epoch, for the epoch axis of charts on the web page", default=0
        ),
        "perform_initial_validation": _flag("whether to validate before the first batch"),
        "checkpoint_policy": _text(
            "after which validations a checkpoint is saved: those with the best metric so far, all, or none",
            default="best",
            enum=("best", "all", "none"),
        ),
        "checkpoint_storage": _STORAGE,
        "environment": _ENVIRONMENT,
        "bind_mounts": _rule(_UNUSED, "list", default=[]),
        "data": _rule(
            "free settings that the trial reads; `data.dstrial` has the settings of dstrial",
            "mapping",
            default={},
            section=Section(
                {
                    "dstrial": _rule(
                        "settings of dstrial",
                        "mapping",
                        section=DSTRIAL,
                        fix="Write {pipeline_stages: 2}, for example.",
                    )
                },
                is_open=True,
                fills_in=False,
            ),
        ),
        "profiling": _section(
            "system metrics: use of CPU, memory, disk, network and GPUs",
            enabled=_flag("whether system metrics are collected"),
            begin_on_batch=_count("without effect", default=0),
            end_after_batch=_count("without effect"),
            sync_timings=_flag("without effect", default=True),
        ),
        "reproducibility": _section(
            "seed of random numbers",
            experiment_seed=_count("seed of the search and of the trials", default=0, maximum=2**32 - 1),
        ),
        "labels": _list_of("labels of the experiment", _WORD),
        "log_policies": _list_of(
            "actions that a matching line of a trial's log triggers", _POLICY, max_items=100
        ),
        "retention_policy": _section(
            "how long logs are kept",
            log_retention_days=_rule(
                "number of days for which logs are kept; -1: forever; the master's setting unless given",
                "integer",
                minimum=-1,
                maximum=32767,
            ),
        ),
        "preemption_timeout": _count(
            "seconds after a request to stop within which a trial must save and exit, or is killed; "
            f"{DEFAULT_PREEMPTION_TIMEOUT_S} unless given",
            minimum=1,
        ),
        "workspace": _text("workspace of the experiment; requires `project`", default=""),
        "project": _text("project of the experiment; requires `workspace`", default=""),
        "optimizations": _section(
            "without effect: Horovod's settings",
            aggregation_frequency=_count("without effect", default=1, minimum=1),
            average_aggregated_gradients=_flag("without effect", default=True),
            average_training_metrics=_flag("without effect", default=True),
            gradient_compression=_flag("without effect"),
            mixed_precision=_text("without effect", default="O0"),
            tensor_fusion_threshold=_rule("without effect", "integer", default=64),
            tensor_fusion_cycle_time=_rule("without effect", "integer", default=1),
            auto_tune_tensor_fusion=_flag("without effect"),
            grad_updates_size_file=_text("without effect"),
        ),
        "integrations": _rule(
            "webhooks of the experiment; settings of other systems are accepted without effect",
            "mapping",
            section=Section(
                {
                    "webhooks": _rule(
                        "webhooks of mode `specific` that the experiment triggers",
                        "mapping",
                        section=_WEBHOOKS,
                        fix="Write {webhook_name: [NAME]}.",
                    )
                },
                is_open=True,
                fills_in=False,
            ),
            fix="Write {webhooks: {webhook_name: [NAME]}}.",
        ),
        "security": _rule("without effect", _ANY),
        "slurm": _rule(
            "`sbatch_args`: list of options for `sbatch`, if trials run on Slurm", "mapping", default={}
        ),
        "pbs": _rule("without effect", "mapping", default={}),
        "tensorboard_storage": _rule("without effect", _ANY),
        "data_layer": _rule("without effect", _ANY),
        "debug": _flag("debug flag that is passed to the trials"),
        "internal": _rule("without effect", _ANY),
    }
)


DIALECT = Dialect(name="the experiment config", null_is_absent=True)


def experiment_schema() -> dict[str, Any]:
    """Return the JSON Schema of an experiment config: keys, types, bounds, defaults."""
    return json_schema(EXPERIMENT, "Experiment config of Determined and dstrial")
