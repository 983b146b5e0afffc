"""Identification of ranks by recorded environment variables of all launchers."""

from __future__ import annotations

import re

import pytest

from dstrial.errors import RankIdentityError
from dstrial.ranks.identity import RankIdentity, identify

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
DETERMINED_TORCH = {**TORCHRUN, "USE_TORCH_DISTRIBUTED": "True", "DET_CHIEF_IP": "10.0.0.5"}
DETERMINED_DEEPSPEED = {**DEEPSPEED, "USE_DEEPSPEED": "1", "DET_CHIEF_IP": "10.0.0.5"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_GTIDS": "0,1",
}
# Open MPI 5.0.11 and 4.1.8, each started with -n 2 on one machine.
OPENMPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-8276@1",
    "PMIX_RANK": "1",
}
OPENMPI_4 = {
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1320550401",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1320550401",
    "PMIX_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PATH": "/bin"}, RankIdentity(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "none")),
        (TORCHRUN, RankIdentity(3, 4, 1, 2, 1, 2, "node0", 29400, "torchrun")),
        (DEEPSPEED, RankIdentity(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "deepspeed")),
        (DETERMINED_TORCH, identify(TORCHRUN)),
        (DETERMINED_DEEPSPEED, identify(DEEPSPEED)),
    ],
    ids=["none", "torchrun", "deepspeed", "determined torch", "determined deepspeed"],
)
def test_identify_by_launcher(environ: dict[str, str], expected: RankIdentity) -> None:
    assert identify(environ) == expected


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({**TORCHRUN, "LOCAL_SIZE": "7"}, "local_world_size", 2),
        ({**DETERMINED_TORCH, "MASTER_ADDR": ""}, "master_addr", "10.0.0.5"),
        ({**SRUN, **TORCHRUN}, "launcher", "torchrun"),
        ({**SRUN, "SLURM_NTASKS": "64"}, "world_size", 2),  # the step's tasks, not the allocation's
    ],
)
def test_identify_prefers_most_specific_variable(environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(identify(environ), field) == value


@pytest.mark.parametrize("environ", [SRUN, OPENMPI_5, OPENMPI_4], ids=lambda e: sorted(e)[0])
def test_single_node_job_derives_address_and_port(environ: dict[str, str]) -> None:
    rank_1 = identify(environ)
    other_names = ("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    other_names += ("OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK")
    rank_0 = identify({**environ, **{name: "0" for name in other_names if name in environ}})
    assert (rank_1.rank, rank_1.world_size, rank_1.local_rank, rank_1.local_world_size) == (1, 2, 1, 2)
    assert (rank_0.rank, rank_0.local_rank, rank_0.is_chief) == (0, 0, True)
    assert (rank_0.num_nodes, rank_0.master_addr) == (1, "127.0.0.1")
    assert rank_0.master_port == rank_1.master_port
    assert 15_000 <= rank_0.master_port < 29_000


def test_srun_multi_node_derives_master_address_from_nodelist() -> None:
    environ = {
        **SRUN,
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_GTIDS": "1",
        "SLURM_STEP_NODELIST": "gpu[08-09]",
        "SLURMD_NODENAME": "gpu09",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    identity = identify(environ)
    assert identity.master_addr == "gpu08"
    given = identify({**environ, "MASTER_ADDR": "10.0.0.8"})
    assert given.master_addr == "10.0.0.8"


def test_slurm_heterogeneous_step_needs_master_address() -> None:
    # Slurm 22.05 for rank 0 of `srun -N1 -n1 -w host3 : -N2 -n3 -w host1,host2`.
    environ = {
        **SRUN,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "host[1-3]",
        "SLURMD_NODENAME": "host3",
    }
    with pytest.raises(RankIdentityError, match="Set MASTER_ADDR=host3 for all ranks"):
        identify(environ)
    identity = identify({**environ, "MASTER_ADDR": "host3"})
    assert (identity.local_world_size, identity.master_addr) == (1, "host3")


@pytest.mark.parametrize(
    "environ",
    [
        {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_NTASKS": "8"},
        {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
    ],
    ids=["sbatch script", "interactive step of salloc", "salloc shell"],
)
def test_slurm_allocation_without_srun_is_single_rank(environ: dict[str, str]) -> None:
    assert identify(environ).world_size == 1


def test_exported_world_size_must_agree_with_srun() -> None:
    assert identify({**SRUN, "WORLD_SIZE": "2"}).launcher == "slurm"
    with pytest.raises(RankIdentityError, match="WORLD_SIZE is '3'; expected 2, as slurm says"):
        identify({**SRUN, "WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, "the rank is 4 of 4"),
        ({**TORCHRUN, "RANK": "-1"}, "the rank is -1 of 4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "the local rank is 2 of 2"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'; expected an integer"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"RANK": "0"}, "WORLD_SIZE is unset although RANK is set"),
        ({"WORLD_SIZE": "2"}, "RANK is unset although WORLD_SIZE is set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is unset"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is unset"),
        ({**DEEPSPEED, "MASTER_PORT": ""}, "MASTER_PORT is unset"),
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"},
            "MASTER_ADDR is unset",
        ),
        ({**OPENMPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR is unset"),
        ({"MPI_LOCALRANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE is 2, of an mpirun that"),
    ],
)
def test_contradictory_environment_names_variable_and_values(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RankIdentityError, match=re.escape(message)) as caught:
        identify(environ)
    assert "Seen in the environment: " in str(caught.value)
