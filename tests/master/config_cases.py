"""Experiment configs that exercise every field: what is submitted, and what it differs from the defaults in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

IMAGE = "none: the embedded master runs trials without containers"
POLICIES = [
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": None},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*", "action": None},
]
SEARCHER = {
    "metric": "loss",
    "smaller_is_better": True,
    "source_trial_id": None,
    "source_checkpoint_uuid": None,
    "max_length": None,
    "max_time": None,
    "time_metric": None,
}
ASHA = {"max_concurrent_trials": 16, "divisor": 4, "stop_once": False, "train_stragglers": None}
SEARCHERS: dict[str, dict[str, Any]] = {
    "single": SEARCHER,
    "random": {**SEARCHER, "max_concurrent_trials": 16},
    "grid": {**SEARCHER, "max_concurrent_trials": 16},
    "adaptive_asha": {**SEARCHER, **ASHA, "max_rungs": 5, "bracket_rungs": [], "mode": "standard"},
    "async_halving": {**SEARCHER, **ASHA},
}
SAVE = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
SHARED_FS = {
    "type": "shared_fs",
    "storage_path": None,
    "propagation": "rprivate",
    "container_path": None,
    "checkpoint_path": None,
    "tensorboard_path": None,
    **SAVE,
}
DEFAULTS: dict[str, Any] = {
    "description": None,
    "hyperparameters": {},
    "resources": {
        "slots_per_trial": 1,
        "max_slots": None,
        "priority": None,
        "weight": 1,
        "resource_pool": "",
        "devices": [],
        "shm_size": None,
        "native_parallel": False,
        "is_single_node": None,
        "agent_label": None,
    },
    "max_restarts": 5,
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
    "scheduling_unit": 100,
    "records_per_epoch": 0,
    "perform_initial_validation": False,
    "checkpoint_policy": "best",
    "environment": {
        "environment_variables": {"cpu": [], "cuda": [], "rocm": []},
        "image": {"cpu": IMAGE, "cuda": IMAGE, "rocm": IMAGE},
        "pod_spec": None,
        "ports": {},
        "registry_auth": None,
        "force_pull_image": False,
        "add_capabilities": [],
        "drop_capabilities": [],
        "proxy_ports": [],
    },
    "bind_mounts": [],
    "data": {},
    "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
    "labels": [],
    "log_policies": POLICIES,
    "retention_policy": {"log_retention_days": None},
    "preemption_timeout": None,
    "workspace": "",
    "project": "",
    "optimizations": {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "average_training_metrics": True,
        "gradient_compression": False,
        "mixed_precision": "O0",
        "tensor_fusion_threshold": 64,
        "tensor_fusion_cycle_time": 1,
        "auto_tune_tensor_fusion": False,
        "grad_updates_size_file": None,
    },
    "integrations": None,
    "security": None,
    "slurm": {},
    "pbs": {},
    "tensorboard_storage": None,
    "data_layer": None,
    "debug": False,
    "internal": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One config.

    Attributes:
        given: what is submitted, besides name, entrypoint, searcher and seed where it has none.
        also: sections in which the completed config is neither given nor a default, whole.
        hparams: what the first trial sees, where these are not constants.
        template: what is below the config.
    """

    given: Mapping[str, Any]
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hparams: Mapping[str, Any] | None = None
    template: Mapping[str, Any] | None = None

    def completed(self, submitted: Mapping[str, Any], host_path: str) -> dict[str, Any]:
        """Return what the master must make of it: what is given over the defaults, section by section."""
        expected = copy.deepcopy(DEFAULTS)
        expected["searcher"] = SEARCHERS[submitted["searcher"]["name"]]
        expected["checkpoint_storage"] = {**SHARED_FS, "host_path": host_path}
        for key, value in submitted.items():
            below = expected.get(key)
            is_section = isinstance(below, dict) and isinstance(value, Mapping) and not key.startswith("min_")
            expected[key] = {**below, **value} if is_section and below is not None else value
        return {**expected, **copy.deepcopy(dict(self.also))}


def _of(name: str, **fields: Any) -> dict[str, Any]:
    return {"searcher": {"name": name, "metric": "loss", **fields}}


def _environment(**fields: Any) -> dict[str, Any]:
    return {"environment": {**DEFAULTS["environment"], **fields}}


def _resources(**fields: Any) -> dict[str, Any]:
    return {"resources": {**DEFAULTS["resources"], **fields}}


_CONST = {"type": "const", "val": 3}
_TIMES = {"max_time": 16, "time_metric": "batches"}
_MOUNT = {"host_path": "/a", "container_path": "b"}
_EVERY_DEVICE = {"cpu": ["A=1"], "cuda": ["A=1"], "rocm": ["A=1"]}
_WHOLE_SHARED_FS = {
    "type": "shared_fs",
    "host_path": "/ck",
    "storage_path": "sub",
    "propagation": "shared",
    "container_path": "/in",
    "checkpoint_path": "/ck/a",
    "tensorboard_path": "/ck/b",
    "save_experiment_best": 2,
    "save_trial_best": 3,
    "save_trial_latest": 4,
}


CASES: dict[str, Case] = {
    "nothing but what must be": Case({}),
    "description and labels": Case(
        {"description": "a text", "labels": ["b", "a", "b"]}, {"labels": ["a", "b"]}
    ),
    "null is not given": Case(
        {"description": None, "labels": None, "max_restarts": None, "environment": None},
        {"labels": [], "max_restarts": 5, "environment": DEFAULTS["environment"]},
    ),
    "workspace and project": Case({"workspace": "Uncategorized", "project": "Uncategorized"}),
    "numbers of the trainer": Case(
        {
            "scheduling_unit": 7,
            "records_per_epoch": 100,
            "perform_initial_validation": True,
            "checkpoint_policy": "all",
            "max_restarts": 0,
        }
    ),
    "no checkpoints": Case({"checkpoint_policy": "none"}),
    "periods in batches": Case(
        {"min_validation_period": {"batches": 3}, "min_checkpoint_period": {"batches": 4}}
    ),
    "periods in records and epochs": Case(
        {
            "min_validation_period": {"records": 64},
            "min_checkpoint_period": {"epochs": 2},
            "records_per_epoch": 10,
        }
    ),
    "single with a length in batches": Case(_of("single", max_length={"batches": 9})),
    "single with a length in epochs": Case(
        {**_of("single", max_length={"epochs": 2}), "records_per_epoch": 4}
    ),
    "single with a number as its length": Case(_of("single", max_length=12)),
    "a metric that grows": Case(_of("single", smaller_is_better=False)),
    "random": Case(_of("random", max_trials=2, max_concurrent_trials=1)),
    "random, all at once": Case(_of("random", max_trials=1, max_concurrent_trials=0)),
    "grid": Case(
        {
            **_of("grid", max_concurrent_trials=3),
            "hyperparameters": {"n": {"type": "int", "minval": 1, "maxval": 2, "count": 1}},
        },
        hparams={"n": 2},
    ),
    "adaptive ASHA": Case(_of("adaptive_asha", max_trials=2, **_TIMES)),
    "adaptive ASHA with every field": Case(
        _of(
            "adaptive_asha",
            max_trials=2,
            **_TIMES,
            max_rungs=3,
            bracket_rungs=[2],
            divisor=2,
            mode="aggressive",
            max_concurrent_trials=2,
            stop_once=True,
            train_stragglers=False,
        )
    ),
    "async halving": Case(_of("async_halving", max_trials=2, num_rungs=2, **_TIMES)),
    "async halving with every field": Case(
        _of(
            "async_halving",
            max_trials=2,
            num_rungs=3,
            **_TIMES,
            divisor=3.5,
            max_concurrent_trials=1,
            stop_once=False,
            train_stragglers=True,
            max_length={"batches": 16},
        )
    ),
    "constants of every type": Case(
        {
            "hyperparameters": {
                "an_integer": 3,
                "a_number": 1.5,
                "a_text": "x",
                "a_flag": True,
                "nothing": None,
                "a_list": [1, {"type": "int"}],
                "named": _CONST,
            }
        },
        {
            "hyperparameters": {
                "an_integer": {"type": "const", "val": 3},
                "a_number": {"type": "const", "val": 1.5},
                "a_text": {"type": "const", "val": "x"},
                "a_flag": {"type": "const", "val": True},
                "nothing": {"type": "const", "val": None},
                "a_list": {"type": "const", "val": [1, {"type": "int"}]},
                "named": _CONST,
            }
        },
        {
            "an_integer": 3,
            "a_number": 1.5,
            "a_text": "x",
            "a_flag": True,
            "nothing": None,
            "a_list": [1, {"type": "int"}],
            "named": 3,
        },
    ),
    "nested hyperparameters": Case(
        {"hyperparameters": {"outer": {"inner": {"x": 1}, "y": _CONST}}},
        {"hyperparameters": {"outer": {"inner": {"x": {"type": "const", "val": 1}}, "y": _CONST}}},
        {"outer": {"inner": {"x": 1}, "y": 3}},
    ),
    "searched hyperparameters of one value": Case(
        {
            **_of("random", max_trials=1),
            "hyperparameters": {"c": {"type": "categorical", "vals": ["only"]}},
        },
        hparams={"c": "only"},
    ),
    "searched numbers": Case(
        {
            **_of("random", max_trials=1),
            "hyperparameters": {
                "i": {"type": "int", "minval": 1, "maxval": 9},
                "d": {"type": "double", "minval": 0.5, "maxval": 1.5},
                "l": {"type": "log", "minval": -4, "maxval": -1, "base": 10},
            },
            "reproducibility": {"experiment_seed": 5},
        },
        hparams={},
    ),
    "no slots": Case({"resources": {"slots_per_trial": 0}}),
    "slots of commands, too": Case({"resources": {"slots": 3, "slots_per_trial": 0}}),
    "resources": Case(
        {
            "resources": {
                "slots_per_trial": 2,
                "max_slots": 3,
                "priority": 50,
                "weight": 0.5,
                "resource_pool": "default",
                "shm_size": 1024,
                "native_parallel": True,
                "is_single_node": True,
                "agent_label": "x",
            }
        }
    ),
    "memory as a text": Case({"resources": {"shm_size": "4g"}}),
    "devices": Case(
        {"resources": {"devices": [{**_MOUNT, "mode": "r"}, _MOUNT, "/c:/d", "/e:/f:rw"]}},
        _resources(
            devices=[
                {**_MOUNT, "mode": "r"},
                {**_MOUNT, "mode": "mrw"},
                {"host_path": "/c", "container_path": "/d", "mode": "mrw"},
                {"host_path": "/e", "container_path": "/f", "mode": "rw"},
            ]
        ),
    ),
    "mounts": Case(
        {
            "bind_mounts": [
                _MOUNT,
                {**_MOUNT, "container_path": "/c", "read_only": True, "propagation": "shared"},
            ]
        },
        {
            "bind_mounts": [
                {**_MOUNT, "read_only": False, "propagation": "rprivate"},
                {"host_path": "/a", "container_path": "/c", "read_only": True, "propagation": "shared"},
            ]
        },
    ),
    "variables as a list": Case(
        {"environment": {"environment_variables": ["A=0", "A=1"]}},
        _environment(environment_variables=_EVERY_DEVICE),
    ),
    "variables by device": Case(
        {"environment": {"environment_variables": {"cpu": ["A=1"], "cuda": ["B=a=b"]}}},
        _environment(environment_variables={"cpu": ["A=1"], "cuda": ["B=a=b"], "rocm": []}),
    ),
    "one image": Case(
        {"environment": {"image": "mine"}},
        _environment(image={"cpu": "mine", "cuda": "mine", "rocm": "mine"}),
    ),
    "one of three images": Case(
        {"environment": {"image": {"gpu": "mine"}}},
        _environment(image={"cpu": IMAGE, "cuda": "mine", "rocm": IMAGE}),
    ),
    "variables of gpu": Case(
        {"environment": {"environment_variables": {"gpu": ["A=1"]}}},
        _environment(environment_variables={"cpu": [], "cuda": ["A=1"], "rocm": []}),
    ),
    "images by device": Case({"environment": {"image": {"cpu": "a", "cuda": "b", "rocm": "c"}}}),
    "what only containers need": Case(
        {
            "environment": {
                "pod_spec": {"metadata": {"labels": {"a": "b"}}},
                "ports": {"http": 80},
                "registry_auth": {"username": "u", "password": "p"},
                "force_pull_image": True,
                "add_capabilities": ["CAP_X"],
                "drop_capabilities": ["CAP_Y"],
            }
        }
    ),
    "proxy ports": Case(
        {"environment": {"proxy_ports": [{"proxy_port": 6006, "proxy_tcp": True}, {"proxy_port": 80}]}},
        _environment(
            proxy_ports=[
                {
                    "proxy_port": 6006,
                    "proxy_tcp": True,
                    "unauthenticated": False,
                    "default_service_id": False,
                },
                {"proxy_port": 80, "proxy_tcp": False, "unauthenticated": False, "default_service_id": False},
            ]
        ),
    ),
    "how many checkpoints to keep": Case(
        {"checkpoint_storage": {"save_experiment_best": 5, "save_trial_best": 0, "save_trial_latest": 2}}
    ),
    "a shared file system with every field": Case({"checkpoint_storage": _WHOLE_SHARED_FS}),
    "a directory": Case(
        {"checkpoint_storage": {"type": "directory", "container_path": "/x"}},
        {"checkpoint_storage": {"type": "directory", "container_path": "/x", **SAVE}},
    ),
    "a bucket": Case(
        {
            "checkpoint_storage": {
                "type": "s3",
                "bucket": "b",
                "prefix": "p",
                "access_key": "k",
                "secret_key": "s",
                "endpoint_url": "http://x",
            }
        },
        {
            "checkpoint_storage": {
                "type": "s3",
                "bucket": "b",
                "prefix": "p",
                "access_key": "k",
                "secret_key": "s",
                "endpoint_url": "http://x",
                **SAVE,
            }
        },
    ),
    "another bucket": Case(
        {"checkpoint_storage": {"type": "gcs", "bucket": "b"}},
        {"checkpoint_storage": {"type": "gcs", "bucket": "b", "prefix": None, **SAVE}},
    ),
    "a container by its account": Case(
        {
            "checkpoint_storage": {
                "type": "azure",
                "container": "c",
                "account_url": "u",
                "credential": "x",
            }
        },
        {
            "checkpoint_storage": {
                "type": "azure",
                "container": "c",
                "connection_string": None,
                "account_url": "u",
                "credential": "x",
                **SAVE,
            }
        },
    ),
    "a container by its connection string": Case(
        {"checkpoint_storage": {"type": "azure", "container": "c", "connection_string": "s"}},
        {
            "checkpoint_storage": {
                "type": "azure",
                "container": "c",
                "connection_string": "s",
                "account_url": None,
                "credential": None,
                **SAVE,
            }
        },
    ),
    "data of one's own": Case({"data": {"path": "/data", "shards": [1, 2], "nested": {"a_b": None}}}),
    "profiling": Case(
        {"profiling": {"enabled": True, "begin_on_batch": 3, "end_after_batch": 9, "sync_timings": False}}
    ),
    "a policy of one's own": Case(
        {"log_policies": [{"pattern": "a.*b", "action": "cancel_retries"}]},
        {"log_policies": [*POLICIES, {"name": None, "pattern": "a.*b", "action": "cancel_retries"}]},
    ),
    "a default policy changed and one switched off": Case(
        {
            "log_policies": [
                {"name": "CUDA OOM", "pattern": "mine", "action": {"type": "exclude_node"}},
                {"name": "ECC Error", "pattern": None},
            ]
        },
        {
            "log_policies": [
                {"name": "CUDA OOM", "pattern": "mine", "action": {"type": "exclude_node"}},
                {"name": "ECC Error", "pattern": None, "action": None},
            ]
        },
    ),
    "a default policy that is only named": Case(
        {"log_policies": [{"name": "CUDA OOM"}]},
        {"log_policies": [{"name": "CUDA OOM", "pattern": None, "action": None}, *POLICIES[1:]]},
    ),
    "how long to keep logs": Case({"retention_policy": {"log_retention_days": 30}}),
    "logs for ever": Case({"retention_policy": {"log_retention_days": -1}}),
    "time to stop": Case({"preemption_timeout": 17}),
    "optimizations": Case(
        {
            "optimizations": {
                "aggregation_frequency": 4,
                "average_aggregated_gradients": False,
                "average_training_metrics": False,
                "gradient_compression": True,
                "mixed_precision": "O2",
                "tensor_fusion_threshold": 1,
                "tensor_fusion_cycle_time": 2,
                "auto_tune_tensor_fusion": True,
                "grad_updates_size_file": "/g",
            }
        }
    ),
    "what other systems read": Case(
        {
            "integrations": {"webhooks": {"webhook_id": [1], "webhook_name": ["w"], "exclude": False}},
            "security": {"kerberos": {"config_file": "/k"}},
            "slurm": {"sbatch_args": ["-x"], "slots_per_node": 2},
            "pbs": {"pbsbatch_args": ["-y"]},
            "tensorboard_storage": {"type": "shared_fs", "host_path": "/t"},
            "data_layer": {"type": "shared_fs"},
            "debug": True,
            "internal": {"native": {"command": ["x"]}},
        }
    ),
    "old spellings of YAML": Case(
        {"description": "yes", "data": {"a": "no", "b": 1e-5, "c": "010", "d": 1_000_000_007}}
    ),
    "a template below": Case(
        {"labels": ["mine"], "resources": {"weight": 2}},
        {"labels": ["mine", "theirs"], "max_restarts": 1, **_resources(weight=2, priority=7)},
        template={"labels": ["theirs"], "resources": {"priority": 7, "weight": 3}, "max_restarts": 1},
    ),
    "a template with lists": Case(
        {
            "bind_mounts": [_MOUNT],
            "environment": {"environment_variables": ["A=1"], "proxy_ports": [{"proxy_port": 1}]},
        },
        {
            "bind_mounts": [
                {**_MOUNT, "read_only": False, "propagation": "rprivate"},
                {"host_path": "/t", "container_path": "/t", "read_only": False, "propagation": "rprivate"},
            ],
            **_environment(
                environment_variables=_EVERY_DEVICE,
                proxy_ports=[
                    {
                        "proxy_port": 1,
                        "proxy_tcp": False,
                        "unauthenticated": False,
                        "default_service_id": False,
                    },
                    {
                        "proxy_port": 2,
                        "proxy_tcp": False,
                        "unauthenticated": False,
                        "default_service_id": False,
                    },
                ],
            ),
        },
        template={
            "bind_mounts": [
                {"host_path": "/no", "container_path": "b"},
                {"host_path": "/t", "container_path": "/t"},
            ],
            "environment": {
                "environment_variables": ["A=0"],
                "proxy_ports": [{"proxy_port": 2}, {"proxy_port": 1, "proxy_tcp": True}],
            },
        },
    ),
    "a template of another searcher": Case(
        _of("single"),
        {"searcher": {"name": "single", **SEARCHER, "smaller_is_better": False}},
        template={
            "searcher": {"name": "random", "max_trials": 9, "metric": "other", "smaller_is_better": False}
        },
    ),
}
