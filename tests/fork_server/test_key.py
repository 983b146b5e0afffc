"""Which processes may be forks of the same one."""

from __future__ import annotations

import os

import pytest

from dstrial.determined_imports import SITE
from dstrial.fork_server.key import differing, key_of

_ENVIRONMENT = {"PATH": "/bin", "HOME": "/home/ada", "OMP_NUM_THREADS": "1", "API_KEY": "secret"}


@pytest.mark.parametrize(
    "name",
    [
        "DET_HPARAMS",
        "DSTRIAL_ALLOCATION_MARKER",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "CROSS_SIZE",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "PWD",
        "TMPDIR",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "PYTEST_CURRENT_TEST",
    ],
)
def test_what_tells_a_trial_and_a_rank_who_they_are_may_differ(name: str) -> None:
    assert differing(_ENVIRONMENT, {**_ENVIRONMENT, name: "1"}) == []


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "CUDA_DEVICE_ORDER",
        "GLOO_DEVICE_TRANSPORT",
        "NCCL_DEBUG",
        "HOME",
        "LD_PRELOAD",
        "ANY",
    ],
)
def test_every_other_variable_belongs_to_the_key(name: str) -> None:
    assert differing(_ENVIRONMENT, {**_ENVIRONMENT, name: "another"}) == [name]


def test_names_are_told_and_no_values() -> None:
    assert differing(_ENVIRONMENT, {**_ENVIRONMENT, "API_KEY": "other"}) == ["API_KEY"]


def test_the_directory_of_our_sitecustomize_is_no_difference() -> None:
    with_it = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([SITE, "/mine"])}

    assert differing(with_it, {**_ENVIRONMENT, "PYTHONPATH": "/mine"}) == []
    assert differing(with_it, {**_ENVIRONMENT, "PYTHONPATH": "/others"}) == ["PYTHONPATH"]
    assert "PYTHONPATH" not in key_of({**_ENVIRONMENT, "PYTHONPATH": SITE})


def test_more_names_can_be_free() -> None:
    assert differing(_ENVIRONMENT, {**_ENVIRONMENT, "HOME": "/tmp"}, {"HOME"}) == []
