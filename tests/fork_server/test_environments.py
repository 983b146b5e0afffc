"""Environment variables and commands that permit forks of the same server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dstrial.determined_imports import SITE
from dstrial.fork_server import NVML_CHECK_VARIABLE, differing, is_free, key_of
from dstrial.fork_server.client import trains_trial_class

_ENVIRONMENT = {"PATH": "/bin", "HOME": "/home/ada", "OMP_NUM_THREADS": "1", "ANY": "secret"}


_FREE = "DET_HPARAMS DSTRIAL_ALLOCATION_MARKER RANK LOCAL_RANK GROUP_RANK ROLE_RANK CROSS_SIZE WORLD_SIZE MASTER_PORT"
_FREE += " TORCHELASTIC_RUN_ID PWD TMPDIR CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES PYTEST_CURRENT_TEST"
_OF_KEY = "OMP_NUM_THREADS CUDA_DEVICE_ORDER GLOO_DEVICE_TRANSPORT NCCL_DEBUG HOME LD_PRELOAD ANY"


def test_only_trial_and_rank_variables_may_differ() -> None:
    for name in _FREE.split():
        assert differing(_ENVIRONMENT, {**_ENVIRONMENT, name: "1"}) == []
    for name in _OF_KEY.split():
        assert differing(_ENVIRONMENT, {**_ENVIRONMENT, name: "another"}) == [name]


def test_sitecustomize_directory_is_no_difference() -> None:
    with_it = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([SITE, "/mine"])}

    assert differing(with_it, {**_ENVIRONMENT, "PYTHONPATH": "/mine"}) == []
    assert differing(with_it, {**_ENVIRONMENT, "PYTHONPATH": "/others"}) == ["PYTHONPATH"]
    assert "PYTHONPATH" not in key_of({**_ENVIRONMENT, "PYTHONPATH": SITE})


READ = """
import json, os
READ = set()
class Recording(type(os.environ)):
    def __getitem__(self, name):
        READ.add(name)
        return super().__getitem__(name)
    def __contains__(self, name):
        READ.add(name)
        return super().__contains__(name)
    def __iter__(self):
        # Whatever goes through all of them and takes some by their prefix, as tqdm its own.
        return iter([name for name in super().__iter__() if name.startswith("ALL_")])
os.environ.__class__ = Recording
import dstrial.launch.imported_ahead
print(json.dumps(sorted(READ)))
"""


@pytest.mark.process
def test_imports_ahead_read_only_expected_free_variables() -> None:
    """The expected variables are set or read again in a fork."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "ALL_OF_THEM": "1"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in a process that has compiled
    ended = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    read = json.loads(ended.stdout.splitlines()[-1])
    assert "DS_ACCELERATOR" in read
    assert [name for name in read if is_free(name)] == [
        "DSTRIAL_ALLOCATION_DIR",  # by dstrial; in a fork sitecustomize applies it
        "DTRAIN_SSH_PORT",  # by determined.constants, as the next two; a fork loads it again
        "INTER_TRAIN_PROCESS_COMM_PORT_1",
        "INTER_TRAIN_PROCESS_COMM_PORT_2",
        NVML_CHECK_VARIABLE,  # set by DeepSpeed where it is not
        "TMPDIR",  # by torch._dynamo for its cache, whose directory a fork looks up again
        "TORCHINDUCTOR_CACHE_DIR",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m dstrial.launch --trial model_def:T", True),
        ("-m dstrial.launch --slots 2 --config=e.yaml --trial=model_def:T", True),
        ("-m dstrial.launch --slots 2 -m some.module --trial model_def:T", False),
        ("-m dstrial.launch train.py --trial model_def:T", False),
        ("-m dstrial.launch --slots 2 train.py --trial model_def:T", False),
        ("-m dstrial.launch -- train.py --trial model_def:T", False),
        ("-m dstrial.launch -m train --trial model_def:T", False),
        ("-m dstrial.launch --slots 1 -m dstrial.dsat.rank.standalone_script train.py", False),
        ("-m determined.launch.deepspeed --trial model_def:T", False),
        ("train.py --trial model_def:T", False),
    ],
)
def test_only_trial_class_launches_may_be_forks(words: str, expected: bool) -> None:
    assert trains_trial_class(words.split()) is expected
