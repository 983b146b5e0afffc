"""``dstrial up --backend slurm`` on a Slurm cluster: a job for each trial."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from master_on_hosts import CONFIG, MasterOnHosts, wait_until
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as made:
        yield made


@pytest.fixture
def master(cluster: SlurmCluster, tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a master on three nodes of two CPUs; teardown requires an empty queue."""
    made = MasterOnHosts(cluster.machines, tmp_path, slurm=cluster.variables)
    yield made
    made.down("--now")
    cluster.wait_for_idle(3, timeout=60)
    assert cluster.run("squeue", "-h").stdout == ""


def test_slurm_oversized_job_rejected_pending_job_explained(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    other = cluster.run(
        "sbatch", "--parsable", "--ntasks=6", "--output=/dev/null", "--wrap=sleep 600"
    ).stdout.strip()
    cluster.wait_for_state(int(other), "RUNNING")
    said = master.up()
    assert said.returncode == 0, said.stdout
    # Three nodes of two CPUs have six slots.
    assert "slots:    6 cpu" in said.stdout
    master.refused({"resources": {"slots_per_trial": 7}}, "at most 6, the slots of this master")
    # No node has three CPUs; the master learns that from sbatch.
    three = {"resources": {"slots_per_trial": 3, "is_single_node": True}}
    for changes, text in (
        (
            {**three, "slurm": {"sbatch_args": ["--nodes=1", "--ntasks=3"]}},
            'slurm.sbatch_args is ["--nodes=1", "--ntasks=3"]; expected options with which Slurm takes a job of 3 slots; '
            "sbatch says: allocation failure: Requested node configuration is not available. Ask for fewer slots",
        ),
        (three, "resources.slots_per_trial is 3; expected a job that Slurm takes; sbatch says: allocation"),
    ):
        master.refused(changes, text)

    waits = master.create({})
    (trial,) = master.wait_for_trials(waits, 1)
    master.wait_for_log(trial["id"], ": pending (Resources)")
    listed = master.det("job", "list")
    assert "pending (Resources" in listed
    assert "pending (Resources" in master.command("dstrial", "status").stdout
    det_job = int(listed.split("[job ")[1].split(":")[0])
    assert cluster.job(det_job)["JobState"] == "PENDING"
    assert f"job {det_job}: pending" in master.log(trial["id"])
    # Pausing cancels the job; activating submits a new job.
    master.det("experiment", "pause", str(waits))
    cluster.wait_for_state(det_job, "CANCELLED")
    master.det("experiment", "activate", str(waits))
    cluster.run("scancel", other)
    master.wait_for_state(waits, ("COMPLETED",))
    assert f"job {det_job}:" not in master.command("dstrial", "status").stdout


def test_slurm_trial_rejected_if_drained_waits_if_disabled(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    six = {
        "resources": {"slots_per_trial": 6},
        "hyperparameters": {**CONFIG["hyperparameters"], "micro_batch_size": 1},
    }
    cluster.run("scontrol", "update", "NodeName=host3", "State=drain", "Reason=test")
    try:
        said = master.up()
        assert said.returncode == 0, said.stdout
        master.refused({"resources": {"slots_per_trial": 7}}, "at most 6, the slots of this master")
        master.refused(six, "Requested node configuration is not available")
    finally:
        cluster.run("scontrol", "update", "NodeName=host3", "State=resume")

    master.det("agent", "disable", "host3")
    waits = master.create(six)
    (trial,) = master.wait_for_trials(waits, 1)
    master.wait_for_log(trial["id"], "Slurm rejects its job without host3; retrying: ")
    master.det("agent", "enable", "host3")
    master.wait_for_state(waits, ("COMPLETED",))


def test_slurm_preemption_checkpoints_and_resumes_trial(cluster: SlurmCluster, master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(50, min_checkpoint_period={"batches": 1000})
    high = cluster.run(
        "sbatch", "--parsable", "-p", "high", "--ntasks=6", "--output=/dev/null", "--wrap=sleep 8"
    ).stdout.strip()  # fmt: skip
    # The rest of the message depends on what comes first: Slurm's job state or the signal.
    master.wait_for_log(trial, "gracefully terminating allocation: job ", within_s=60)
    cluster.wait_for_state(int(high), "RUNNING", "COMPLETED")
    master.wait_for_state(experiment, ("COMPLETED",), within_s=150)
    assert master.batches(trial) == list(range(5, 51, 5))
    assert "resumed from checkpoint" in master.log(trial)


def test_slurm_killed_or_cancelled_job_is_replaced(cluster: SlurmCluster, master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(80, slurm={"sbatch_args": ["--nodelist=host3"]})
    (first,) = cluster.run("squeue", "-h", "-o", "%i").stdout.split()
    cluster.run("scancel", "--full", "--signal=KILL", first)
    master.wait_for_log(trial, "resumed from checkpoint", within_s=120)
    of_first = [
        words for words in cluster.machines[3].processes().values() if f"allocations-{first}/" in words
    ]
    assert of_first == [], "what was killed trains no more"

    at = len(master.batches(trial))
    wait_until(lambda: len(master.batches(trial)) > at, 60, lambda: master.log(trial))
    (second,) = cluster.run("squeue", "-h", "-o", "%i").stdout.split()
    cluster.run("scancel", second)
    master.wait_for_log(trial, "gracefully terminating allocation: job ", within_s=60)
    master.wait_for_state(experiment, ("COMPLETED",), within_s=150)
    assert master.batches(trial)[-1] == 80
    assert master.log(trial).count("resumed from checkpoint") >= 2
    wait_until(
        lambda: not any("dstrial" in words for words in cluster.machines[3].processes().values()),
        30,
        lambda: str(cluster.machines[3].processes()),
    )


def test_slurm_time_limit_checkpoints_and_resumes_trial(master: MasterOnHosts) -> None:
    assert master.up().returncode == 0
    experiment, trial = master.train(
        80, 0.1, min_checkpoint_period={"batches": 1000}, slurm={"sbatch_args": ["--time=1"]}
    )
    # The limit is 1 minute; its last 30 s are reserved for the checkpoint.
    master.wait_for_log(
        trial, "gracefully terminating allocation: job ", "ends at its time limit in", within_s=120
    )
    master.wait_for_log(trial, "resumed from checkpoint", within_s=120)
    numbers = master.batches(trial)
    assert numbers == list(range(5, numbers[-1] + 1, 5))
    master.det("experiment", "kill", str(experiment))
    master.wait_for_state(experiment, ("CANCELED",))


def test_slurm_controller_down_trial_waits_and_completes(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    controller = cluster.machines[1].find("slurmctld -c") or cluster.machines[1].find("slurmctld")
    assert controller is not None
    cluster.machines[1].signal(controller, signal.SIGKILL)
    try:
        experiment = master.create({})
        (trial,) = master.wait_for_trials(experiment, 1)
        master.wait_for_log(trial["id"], "waiting for Slurm: ", "contact slurm controller", within_s=120)
        assert "contact slurm controller" in master.command("dstrial", "status").stdout
    finally:
        cluster.start_controller()
    master.wait_for_state(experiment, ("COMPLETED",), within_s=180)
    assert master.log(trial["id"]).count("waiting for Slurm: ") == 1


def test_up_invalid_slurm_setup_starts_no_master(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ["env", f"PATH={tmp_path}", sys.executable, "-m", "dstrial", "up", "--backend", "slurm"]
    said = cluster.run(*words, cwd=tmp_path, env={"DSTRIAL_STATE_DIR": str(tmp_path / "state")})
    assert said.returncode == 1
    assert "sbatch, squeue, scancel, srun, sinfo of Slurm is not on PATH" in said.stdout

    master = MasterOnHosts(cluster.machines, tmp_path, slurm=cluster.variables)
    (tmp_path / "master.yaml").write_text("slurm: {sbatch_args: [--partition=none]}\n")
    said = master.up("--config-file", "master.yaml")
    assert said.returncode == 1
    assert "invalid partition specified: none" in said.stdout
    assert "Name one that `sinfo` lists" in said.stdout
    said = master.up("--slots", "3")
    assert said.returncode == 1
    assert "--slots is given beside backend slurm" in said.stdout
    assert master.command("dstrial", "status").returncode != 0, "nothing was started"


def test_up_slurm_outside_allocation_is_rejected(cluster: SlurmCluster, tmp_path: Path) -> None:
    master = MasterOnHosts(cluster.machines, tmp_path, allocation={})
    said = master.up()
    assert said.returncode == 1
    assert "--slurm is given, and this is in no allocation" in said.stdout
    assert master.command("dstrial", "status").returncode != 0, "nothing was started"


def test_cut_node_disabled_before_slurm_reports_down(tmp_path: Path) -> None:
    with slurm_cluster(3, slurmd_timeout_s=200) as cluster:
        master = MasterOnHosts(cluster.machines, tmp_path, slurm=cluster.variables)
        assert master.up().returncode == 0
        experiment = master.create(
            {
                "hyperparameters": {**CONFIG["hyperparameters"], "pause_s": 0.2},
                "searcher": {**CONFIG["searcher"], "max_length": {"batches": 2000}},
                "slurm": {"sbatch_args": ["--nodelist=host3"]},
            }
        )
        (trial,) = master.wait_for_trials(experiment, 1)
        master.wait_for_log(trial["id"], "batch 5 loss", within_s=120)
        assert master.enabled() == {"host1": True, "host2": True, "host3": True}
        cluster.machines[3].cut()
        wait_until(lambda: not master.enabled()["host3"], 60, lambda: str(master.enabled()))
        said = cluster.run("sinfo", "-h", "-N", "-n", "host3", "-p", "low", "-o", "%T").stdout.strip()
        # Slurm does not know yet: the node's jobs run, or complete if the master has cancelled them.
        assert said.removesuffix("*") in ("mixed", "allocated", "completing"), said
        assert "host3 is silent" in master.command("dstrial", "status").stdout
        assert master.enabled() == {"host1": True, "host2": True, "host3": False}
        cluster.heal(3)
        wait_until(lambda: master.enabled()["host3"], 180, lambda: str(master.enabled()))
        master.det("experiment", "kill", str(experiment))
        master.wait_for_state(experiment, ("CANCELED",))
        master.down("--now")


def test_slurm_invalid_options_rejected_without_queued_job(
    cluster: SlurmCluster, master: MasterOnHosts
) -> None:
    assert master.up().returncode == 0
    before = cluster.run("squeue", "-h", "--states=all", "-o", "%i").stdout
    for option, text in (
        ("--partition=nope", "a job of 1 slot; sbatch says: invalid partition specified: nope; "),
        ("--array=1-3", "expected none of --array=1-3, by which the master finds its jobs. Leave them out."),
        ("partition=low", "slurm.sbatch_args[0] is 'partition=low'; expected an option of sbatch"),
    ):
        said = master.refused({"slurm": {"sbatch_args": [option]}}, text)
        line = (master.place / "exp.yaml").read_text().splitlines().index("slurm:") + 1
        assert re.search(rf"experiment config:({line}|{line + 1}): slurm\.sbatch_args", said)
    config = {"resources": {"slots": 2}, "slurm": {"sbatch_args": ["--mem=90G"]}}
    (master.place / "command.yaml").write_text(yaml.safe_dump(config))
    commands = master.det("command", "list", "--csv")
    done = master.command("det", "command", "run", "--config-file", "command.yaml", "true")
    assert done.returncode != 0, done.stdout
    for text in ("Command config: slurm.sbatch_args is ", "a job of 2 slots; sbatch says: "):
        assert done.stdout.count(text) == 1, done.stdout
    assert master.det("command", "list", "--csv") == commands
    # The check removes its temporary files.
    assert list((master.place / "state" / "slurm").glob("check-*")) == []

    # If a partition disappears later, the trial waits and logs the reason.
    cluster.run("scontrol", "create", "PartitionName=soon", "Nodes=host[1-3]")
    files = master.write({"slurm": {"sbatch_args": ["--partition=soon"]}})
    created = master.det("experiment", "create", "--paused", *files)
    experiment = int(created.split("Created experiment ")[1].split()[0])
    cluster.run("scontrol", "delete", "PartitionName=soon")
    master.det("experiment", "activate", str(experiment))
    (trial,) = master.wait_for_trials(experiment, 1)
    master.wait_for_log(trial["id"], "Slurm rejects its job; retrying", "invalid partition specified: soon")
    master.det("experiment", "kill", str(experiment))
    master.wait_for_state(experiment, ("CANCELED",))
    after = cluster.run("squeue", "-h", "--states=all", "-o", "%i").stdout
    assert set(after.split()) <= set(before.split())  # Slurm removes old jobs from the list

    # `det experiment continue` with an invalid partition is rejected at once.
    words = ["--config", "slurm.sbatch_args=[--partition=nope]"]
    said = master.command("det", "experiment", "continue", str(experiment), *words).stdout
    assert "sbatch says: invalid partition specified: nope" in said
    assert master.state(experiment) == "STATE_CANCELED"

    # A TensorBoard with slots is checked like a command.
    config = ["--config", "resources.slots=1", "--config", "slurm.sbatch_args=[--partition=nope]"]
    said = master.command("det", "tensorboard", "start", "--no-browser", *config, str(experiment)).stdout
    assert (
        said.count('TensorBoard config: slurm.sbatch_args is ["--partition=nope"]; expected options with')
        == 1
    )
    assert json.loads(master.det("tensorboard", "list", "--json")) == []


def test_slurm_unusable_node_named_with_remedy(cluster: SlurmCluster, master: MasterOnHosts) -> None:
    (master.place / "master.yaml").write_text("hosts_python: /opt/nowhere/bin/python\n")
    assert master.up("--config-file", "master.yaml").returncode == 0
    said = _never_starts_reason(master, "host2")
    assert "3 jobs in a row failed before it began" in said
    assert "host2 is without Python at /opt/nowhere/bin/python. Put the environment on a file system" in said
    master.down("--now")

    (master.place / "master.yaml").write_text("{}\n")
    assert master.up("--config-file", "master.yaml").returncode == 0
    cluster.machines[2].hide(master.place / "state")
    try:
        said = _never_starts_reason(master, "host2")
    finally:
        cluster.machines[2].run(["umount", str(master.place / "state")], cwd="/")
    assert (
        "host2 does not see this directory. Start the master with a --state-dir that all nodes mount" in said
    )


def _never_starts_reason(master: MasterOnHosts, host: str) -> str:
    experiment = master.create({"slurm": {"sbatch_args": [f"--nodelist={host}"]}})
    master.wait_for_state(experiment, ("ERROR",), within_s=200)
    (trial,) = master.trials(experiment)
    (line,) = [line for line in master.log(trial["id"]).splitlines() if "it can never start: " in line]
    return line
