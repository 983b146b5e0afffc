"""Nodes, tasks and slots of a Slurm allocation, and expansion of node lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.errors import LaunchError
from dstrial.hosts.srun import transport_of
from dstrial.slurm.allocation import (
    Allocation,
    allocation_of,
    expand_counts,
    expand_nodes,
    slots_of_nodes,
)

_BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "gpu[1-2],login",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "0",
    "ENVIRONMENT": "BATCH",
}


def test_batch_variables_give_nodes_tasks_and_devices() -> None:
    found = allocation_of({**_BATCH, "SLURM_GPUS_ON_NODE": "2"})
    assert found == Allocation(12, ("gpu1", "gpu2", "login"), (2, 2, 1), 2)
    assert allocation_of({}) is None
    assert allocation_of({"SLURM_JOB_ID": "12"}) is None, "SLURM_JOB_ID alone is no allocation"


def test_only_multi_task_srun_steps_are_refused() -> None:
    step = {**_BATCH, "SLURM_STEP_ID": "4", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(LaunchError, match="one of 2 tasks of srun"):
        allocation_of(step)
    assert allocation_of({**step, "SLURM_STEP_NUM_TASKS": "1"}) is not None
    # SLURM_STEP_ID of salloc's interactive step
    assert allocation_of({**step, "SLURM_STEP_ID": str(0xFFFFFFFA)}) is not None


def test_malformed_nodelist_is_named_in_error() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_JOB_NODELIST='gpu\[1-'"):
        allocation_of({**_BATCH, "SLURM_JOB_NODELIST": "gpu[1-"})


@pytest.mark.parametrize(
    ("tasks", "devices", "wanted", "slots"),
    [
        ((2, 2, 1), 0, None, [2, 2, 1]),
        ((2, 2, 1), 0, 5, [2, 2, 1]),
        ((2, 2, 1), 0, 3, [2, 1, 0]),
        ((1, 1), 0, None, [1, 1]),
        ((1, 1), 8, None, [8, 8]),
        ((1, 1), 8, 16, [8, 8]),
        ((1, 1), 0, 4, [2, 2]),
        ((1, 1), 8, 1, [1, 0]),
        ((1,), 0, 4, [4]),
    ],
)
def test_slots_are_tasks_or_divided_among_nodes(
    tasks: tuple[int, ...], devices: int, wanted: int | None, slots: list[int]
) -> None:
    nodes = tuple(f"n{number}" for number in range(len(tasks)))
    assert slots_of_nodes(Allocation(1, nodes, tasks, devices), wanted) == slots


@pytest.mark.parametrize(
    ("tasks", "wanted", "said"), [((2, 1), 4, "have 3 tasks"), ((1, 1), 3, "expected a multiple of 2")]
)
def test_too_many_slots_error_names_ntasks_option(tasks: tuple[int, ...], wanted: int, said: str) -> None:
    with pytest.raises(LaunchError, match=said) as raised:
        slots_of_nodes(Allocation(1, ("a", "b"), tasks), wanted)
    assert f"--ntasks={wanted}" in str(raised.value)


def test_num_devices_is_read_from_each_gpu_variable() -> None:
    for name, text in (
        ("SLURM_GPUS_ON_NODE", "4"),
        ("SLURM_GPUS_PER_NODE", "h100:4"),
        ("SLURM_JOB_GPUS", "0,1,2,7"),
    ):
        found = allocation_of({**_BATCH, name: text})
        assert found is not None
        assert found.num_devices == 4


def test_srun_requests_gpus_when_allocation_divides_them() -> None:
    """srun gets ``--gpus`` if GPUs were requested per task or in total, not per node."""
    base = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    for more, counts in (
        ({"SLURM_GPUS_PER_TASK": "1"}, {"n1": 2, "n2": 1}),
        ({"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"}, {"n1": 2, "n2": 1}),
        ({"SLURM_GPUS": "3"}, {"n1": 2, "n2": 1}),
        ({"SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}, {}),
        ({"SLURM_TRES_PER_TASK": "cpu=1"}, {}),
        ({}, {}),
    ):
        allocation = allocation_of({**base, **more})
        assert allocation is not None
        transport = transport_of(allocation)
        for host in ("n1", "n2"):
            asked = [word for word in transport.words(host, "python") if word.startswith("--gpus")]
            assert asked == ([f"--gpus={counts[host]}"] if counts else [])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("host1", ["host1"]),
        ("host[1-3]", ["host1", "host2", "host3"]),
        ("host[1,3]", ["host1", "host3"]),
        ("gpu[01-03,7]-ib,login", ["gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu7-ib", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
        ("a.b-c_d,e[5]", ["a.b-c_d", "e5"]),
        ("", []),
    ],
)
def test_expand_nodes_follows_slurm_syntax(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text", ["host[1-", "host]1[", "a,,b", "host[3-1]", "host[a-b]", "host[]", "h[1-99999999]", ",a"]
)
def test_expand_nodes_rejects_malformed_lists(text: str) -> None:
    with pytest.raises(ValueError, match="no list of Slurm's nodes"):
        expand_nodes(text)


@given(st.lists(st.integers(1, 9), max_size=8))
def test_expand_counts_round_trips(counts: list[int]) -> None:
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == counts


def test_expand_counts_of_malformed_text_is_empty() -> None:
    assert expand_counts("four") == expand_counts("4(x)") == []
