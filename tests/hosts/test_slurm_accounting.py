"""Accounts and QOS of Slurm, of a real cluster.

What sbatch refuses is said before anything is queued; the rest waits with Slurm's reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from bad_requests import refused
from master_on_hosts import MasterOnHosts
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_run import CONFIG, SlurmRun

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
_ACCOUNT = "Name an account that may use the partition (--account=NAME"
_QOS = "Name one that your account has (--qos=NAME"
_LIMITS = "Ask for less, or name another QOS or account (--qos=NAME, --account=NAME"
_NEVER = (
    ("--account=nope", 1, f"Invalid account or account/partition combination specified. {_ACCOUNT}"),
    ("--account=closed", 1, f"Invalid account or account/partition combination specified. {_ACCOUNT}"),
    ("--qos=nope", 1, f"Invalid qos specification. {_QOS}"),
    ("--qos=others", 1, f"Invalid qos specification. {_QOS}"),
    (
        "--qos=strict",
        3,
        f"Job violates accounting/QOS policy (job submit limit, user's size and/or time limits). {_LIMITS}",
    ),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Return two nodes of two processors each; root has the accounts ``lab``, its default, and ``two``."""
    with slurm_cluster(2, has_accounts=True) as made:
        accounting = made.accounting
        assert accounting is not None
        for name in ("lab", "two", "closed"):
            accounting.change("add", "account", name)
        accounting.change("modify", "account", "two", "set", "GrpTRES=cpu=2")
        accounting.change("add", "qos", "tiny", "set", "MaxTRESPerUser=cpu=2")
        accounting.change("add", "qos", "strict", "set", "MaxTRESPerJob=cpu=2", "Flags=DenyOnLimit")
        accounting.change("add", "qos", "one", "set", "MaxSubmitJobsPerUser=1")
        accounting.change("add", "qos", "others")
        accounting.change("delete", "user", "root")  # Who is in Slurm's own account.
        _admit(made)
        yield made


def _admit(cluster: SlurmCluster) -> None:
    assert cluster.accounting is not None
    cluster.accounting.change("add", "user", "root", "account=lab,two", "defaultaccount=lab")
    cluster.accounting.change("modify", "user", "root", "set", "qos=normal,tiny,strict,one")


@pytest.fixture
def place(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Path]:
    shutil.copy(Path(__file__).parent / "small_trial.py", tmp_path)
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
    yield tmp_path
    cluster.run("scancel", "--user=root")
    cluster.wait_for_idle(2, timeout=60)


@pytest.fixture
def nobody(cluster: SlurmCluster) -> Iterator[None]:
    """Have no account for the block."""
    assert cluster.accounting is not None
    cluster.accounting.change("delete", "user", "root")
    yield
    _admit(cluster)


def _other(cluster: SlurmCluster, option: str) -> int:
    """Return a job of somebody else's that runs on two processors."""
    words = ["sbatch", "--parsable", option, "--ntasks=2", "--output=/dev/null", "--wrap=sleep 600"]
    job = int(cluster.run(*words).stdout)
    cluster.wait_for_state(job, "RUNNING")
    return job


@pytest.mark.parametrize(("option", "num_slots", "said"), _NEVER)
def test_what_an_account_or_a_qos_never_allows_is_refused_before_anything_is_queued(
    cluster: SlurmCluster, place: Path, option: str, num_slots: int, said: str
) -> None:
    flags = ("--slots", str(num_slots), "--config", "+hyperparameters.micro_batch_size=2")
    code, text = SlurmRun(cluster, place, *flags, f"--sbatch-arg={option}").end(30)
    print(text)
    assert code == 1, text
    assert text.count(said) == 1, text
    assert cluster.run("squeue", "-h").stdout == ""
    assert not (place / "runs").exists()


def test_without_an_account_nothing_is_queued(cluster: SlurmCluster, place: Path, nobody: None) -> None:
    code, text = SlurmRun(cluster, place).end(30)
    print(text)
    assert code == 1
    assert text.count(f"Invalid account or account/partition combination specified. {_ACCOUNT}") == 1
    assert cluster.run("squeue", "-h").stdout == ""


def test_a_job_that_a_qos_allows_later_waits_with_the_reason(cluster: SlurmCluster, place: Path) -> None:
    other = _other(cluster, "--qos=tiny")
    run = SlurmRun(cluster, place, "--sbatch-arg=--qos=tiny")
    run.wait_for("pending (QOSMaxCpuPerUserLimit)")
    cluster.run("scancel", str(other))
    code, text = run.end()
    assert code == 0, text


def test_a_master_refuses_the_same_and_waits_for_the_same(cluster: SlurmCluster, tmp_path: Path) -> None:
    variables = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
    master = MasterOnHosts(cluster.machines, tmp_path, slurm=variables)
    assert master.up().returncode == 0
    try:
        for option, num_slots, text in _NEVER[::2]:
            resources = {"slots_per_trial": num_slots}
            print(refused(master, {"resources": resources, "slurm": {"sbatch_args": [option]}}, text))
        assert cluster.run("squeue", "-h").stdout == ""

        other = _other(cluster, "--account=two")
        waits = master.create({"slurm": {"sbatch_args": ["--account=two"]}})
        (trial,) = master.wait_for_trials(waits, 1)
        master.wait_for_log(trial["id"], "pending (AssocGrpCpuLimit)")
        assert "pending (AssocGrpCpuLimit" in master.det("job", "list")
        cluster.run("scancel", str(other))
        master.wait_for_state(waits, ("COMPLETED",))

        # One job of this QOS is in the queue: another one is no error, and is asked for again.
        other = _other(cluster, "--qos=one")
        waits = master.create({"slurm": {"sbatch_args": ["--qos=one"]}})
        (trial,) = master.wait_for_trials(waits, 1)
        master.wait_for_log(trial["id"], "Slurm rejects its job; retrying", "QOSMaxSubmitJobPerUserLimit")
        cluster.run("scancel", str(other))
        master.wait_for_state(waits, ("COMPLETED",), within_s=180)
    finally:
        master.down("--now")
        cluster.run("scancel", "--user=root")
        cluster.wait_for_idle(2, timeout=60)
