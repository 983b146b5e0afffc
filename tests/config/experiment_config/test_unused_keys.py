"""Every config key is used by ``dstrial run`` or named in a warning."""

import pytest

from dstrial.config.diagnostics import Diagnostics
from dstrial.config.experiment_config.check import unused_by_run
from dstrial.config.keys import Dialect, check_keys
from dstrial.config.schema import EXPERIMENT

USED = {
    "checkpoint_storage.type",  # the test sets a type other than shared_fs
    "checkpoint_policy",
    "data",
    "entrypoint",
    "environment.environment_variables",
    "hyperparameters",
    "max_restarts",
    "min_checkpoint_period",
    "min_validation_period",
    "name",
    "perform_initial_validation",
    "preemption_timeout",
    "reproducibility.experiment_seed",
    "resources.slots",  # warned about elsewhere, like keys of searcher and profiling
    "resources.slots_per_trial",
    "scheduling_unit",
    "debug",
    "description",
    "environment.proxy_ports",
    "environment.requirements",
    "integrations",
    "labels",
    "log_policies",
    "project",
    "records_per_epoch",
    "resources.is_single_node",
    "resources.max_slots",
    "resources.priority",
    "resources.resource_pool",
    "retention_policy.log_retention_days",
    "searcher.source_checkpoint_uuid",
    "searcher.source_trial_id",
    "workspace",
}


KEYS = [
    (name, key)
    for name, rule in EXPERIMENT.keys.items()
    for key in (rule.section.keys if rule.section is not None and rule.section.fills_in else [None])
]


def unused(name, key=None, **options):
    """Return the keys reported as unused if only this key is given."""
    raw = check_keys(EXPERIMENT, {}, Dialect(name=""), Diagnostics({}, ""))
    if key is None:
        raw[name] = "given"
    else:
        raw[name][key] = "given"
    return unused_by_run(raw, **{"has_slurm": True, **options})


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_every_key_is_used_or_warned_about(name, key):
    dotted = name if key is None else f"{name}.{key}"
    is_used = dotted in USED or name in ("searcher", "profiling", "slurm")
    is_used = is_used or dotted.startswith("checkpoint_storage.save_")
    shown = name if name in ("optimizations", "retention_policy") else dotted
    assert unused(name, key) == ([] if is_used else [shown])


def test_slurm_section_is_unused_without_slurm():
    assert unused("slurm", has_slurm=False) == ["slurm"]
