from __future__ import annotations

import copy
import json

import pytest
import yaml

from dstrial.config.merge import merge_deepspeed, merge_template, overwrite_deepspeed_config
from dstrial.errors import ConfigError


@pytest.mark.parametrize(
    ("base", "overwrite", "merged"),
    [
        ({"steps_per_print": None}, {}, {"steps_per_print": None}),
        (
            {"zero_optimization": True},
            {"zero_optimization": {"stage": 2}},
            {"zero_optimization": {"stage": 2}},
        ),
        ({"betas": [0.9, 0.99]}, {"betas": [0.5]}, {"betas": [0.5]}),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"d": 3}}}, {"a": {"b": {"c": 1, "d": 3}}}),
        ({"a": {"b": 1}, "c": 1}, {"a": {"b": None}, "c": None, "d": None}, {"a": {}}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
    ],
)
def test_merge_deepspeed_changes_only_overwritten_keys(base, overwrite, merged):
    before = copy.deepcopy((base, overwrite))
    assert merge_deepspeed(base, overwrite) == merged
    assert (base, overwrite) == before


def test_overwrite_of_file_leaves_file_unchanged(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "fp16": {"enabled": True}}))
    merged = overwrite_deepspeed_config(str(path), {"fp16": None, "train_batch_size": 8})

    assert merged == {"train_batch_size": 8}
    assert json.loads(path.read_text())["train_batch_size"] == 4


def test_duplicate_key_in_file_raises(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true,\n "enabled": false}}')

    with pytest.raises(ConfigError, match=r"ds\.json:2: fp16\.enabled is given twice \(first on line 1\)"):
        overwrite_deepspeed_config(str(path), {})


def test_base_config_of_other_type_raises_type_error():
    with pytest.raises(TypeError, match=r"^Expected string or dict for base_ds_config argument\."):
        overwrite_deepspeed_config([("train_batch_size", 4)], {})


CASES = yaml.safe_load("""
a field of the config wins: [{max_restarts: 3}, {max_restarts: 0}, {max_restarts: 0}]
null counts as not given: [{max_restarts: 3}, {max_restarts: null}, {max_restarts: 3}]
sections are merged:
- {resources: {slots_per_trial: 2, priority: 3}}
- {resources: {slots_per_trial: 4}}
- {resources: {slots_per_trial: 4, priority: 3}}
data are merged at every depth: [{data: {a: {b: 1, c: 2}}}, {data: {a: {c: 3}}}, {data: {a: {b: 1, c: 3}}}]
an entrypoint is one: [{entrypoint: [a, b]}, {entrypoint: [c]}, {entrypoint: [c]}]
labels are united: [{labels: [a, b]}, {labels: [b, c]}, {labels: [b, c, a]}]
proxy ports are added by port:
- {environment: {proxy_ports: [{proxy_port: 1, proxy_tcp: true}, {proxy_port: 2}]}}
- {environment: {proxy_ports: [{proxy_port: 1}]}}
- {environment: {proxy_ports: [{proxy_port: 1}, {proxy_port: 2}]}}
variables of the template come first:
- {environment: {environment_variables: [A=1, B=1]}}
- {environment: {environment_variables: [A=2]}}
- {environment: {environment_variables: [A=1, B=1, A=2]}}
variables by device:
- {environment: {environment_variables: [A=1]}}
- {environment: {environment_variables: {cpu: [B=2], cuda: C=3}}}
- {environment: {environment_variables: {cpu: [A=1, B=2], cuda: [A=1, C=3], rocm: [A=1]}}}
an image stands for every device:
- {environment: {image: base}}
- {environment: {image: {cpu: mine}}}
- {environment: {image: {cpu: mine, cuda: base, rocm: base}}}
a partly given storage takes how many to save:
- {checkpoint_storage: {save_experiment_best: 10, save_trial_best: 10, save_trial_latest: 10}}
- {checkpoint_storage: {type: gcs, bucket: b, save_experiment_best: 3}}
- {checkpoint_storage: {type: gcs, bucket: b, save_experiment_best: 3, save_trial_best: 10, save_trial_latest: 10}}
nothing else is taken of another type of storage:
- {checkpoint_storage: {type: s3, bucket: b, save_trial_best: 10, save_trial_latest: 10}}
- {checkpoint_storage: {type: shared_fs, host_path: /tmp, save_trial_best: 1}}
- {checkpoint_storage: {type: shared_fs, host_path: /tmp, save_trial_best: 1, save_trial_latest: 10}}
a storage of the same type is completed:
- {checkpoint_storage: {type: azure, connection_string: s, container: c}}
- {checkpoint_storage: {type: azure}}
- {checkpoint_storage: {type: azure, connection_string: s, container: c}}
a partly given searcher is completed:
- {searcher: {metric: sae, smaller_is_better: true, source_trial_id: 1}}
- {searcher: {name: random, max_trials: 10}}
- {searcher: {name: random, max_trials: 10, metric: sae, smaller_is_better: true, source_trial_id: 1}}
of another searcher only what all have is taken:
- {searcher: {name: random, max_trials: 10, max_length: {batches: 9},
    metric: loss, smaller_is_better: false, source_checkpoint_uuid: u}}
- {searcher: {name: single, metric: loss, smaller_is_better: true}}
- {searcher: {name: single, metric: loss, smaller_is_better: true, source_checkpoint_uuid: u}}
a hyperparameter is never blended:
- {hyperparameters: {n: {type: int, minval: 50, maxval: 500, count: 5}, m: 1}}
- {hyperparameters: {n: {type: int, minval: 10, maxval: 100}}}
- {hyperparameters: {n: {type: int, minval: 10, maxval: 100}, m: 1}}
nested hyperparameters are merged:
- {hyperparameters: {t: {task: lm, backbone: x}}}
- {hyperparameters: {t: {backbone: bert}}}
- {hyperparameters: {t: {task: lm, backbone: bert}}}
hyperparameters are merged only if both are nested:
- {hyperparameters: {t: {task: lm}, u: {type: const, val: 1}}}
- {hyperparameters: {t: null, u: {inner: 2}}}
- {hyperparameters: {t: null, u: {inner: 2}}}
policies are merged by name:
- {log_policies: [{name: oom, pattern: a, action: cancel_retries}, {name: ecc, pattern: b}, {pattern: c}]}
- {log_policies: [{name: oom, pattern: mine}, {pattern: c}, {pattern: d}]}
- {log_policies: [{name: oom, pattern: mine, action: cancel_retries}, {name: ecc, pattern: b}, {pattern: c}, {pattern: d}]}
a period is one:
- {min_validation_period: {batches: 10}}
- {min_validation_period: {epochs: 1}}
- {min_validation_period: {epochs: 1}}
lists are united whatever their items are:
- {labels: [a, 1, [x], {b: [1]}]}
- {labels: [c, true, {b: [1]}]}
- {labels: [c, true, {b: [1]}, a, 1, [x]]}
""")
"""Name -> template, config, merged config."""


@pytest.mark.parametrize("name", CASES)
def test_merge_template_combines_template_and_config(name: str) -> None:
    template, config, merged = CASES[name]
    before = copy.deepcopy((template, config))
    assert merge_template(template, config) == merged
    assert (template, config) == before
