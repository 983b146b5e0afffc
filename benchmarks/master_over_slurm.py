"""What happens under Slurm: how long it takes, what the log says of it, and how it ends.

A real Slurm over namespaces (``tests/hosts/slurm_cluster.py``): three nodes of two slots each, the controller and the master on
the first. A node that is silent for ten seconds is down; what is preempted has twenty seconds to leave. Every scenario has an
experiment of its own under one master, whose jobs have all nodes to themselves; those that begin with ``run`` are jobs of
``dstrial run --slurm``, of which the master knows nothing.

``python benchmarks/master_over_slurm.py [--scenario submit cut …] [--json FILE]``; needs root, sshd and Slurm's daemons.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

import master_scenarios
import yaml
from master_on_hosts import MasterOnHosts
from master_scenarios import RESUMED, Row, Stage, counted, since
from slurm_cluster import SlurmCluster, missing, slurm_cluster
from slurm_run import CONFIG, TWO_NODES, SlurmRun, run_directory

_ASKED_TO_SAVE = "gracefully terminating allocation: job "
_ALL_SLOTS = "--ntasks=6"
_GRACE_S = 20
_IDLE_WITHIN_S = 120.0
_SLOW_S = 0.2
# Of what ranks, agents and their supervisors are started by; the master has none of its own.
_OURS = ("rank_main", "hosts.agent", "supervisor", "launch.node", "dstrial run")


class SlurmStage(Stage):
    """The cluster is Slurm's."""

    def __init__(self, cluster: SlurmCluster, master: MasterOnHosts) -> None:
        super().__init__(cluster.machines, master, r"host\d")
        self.cluster = cluster

    def left(self) -> Sequence[str]:
        """Return the jobs that have nodes or wait for them, and what of ours is on any node."""
        found = [line for host in self.machines.all for line in host.processes().values()]
        return [*self.jobs(), *(line for line in found if any(word in line for word in _OURS))]

    def jobs(self, *options: str) -> list[str]:
        """Return the numbers of the jobs that Slurm has not ended."""
        return self.cluster.run("squeue", "-h", "-o", "%i", *options).stdout.split()

    def jobs_of(self, trial: int) -> list[str]:
        """Return the numbers of a trial's jobs, as its log names them."""
        found = re.findall(r"\bjob (\d+)", "\n".join(self.log(trial)))
        return list(dict.fromkeys(found))

    def hold(self, *options: str, seconds: int = 900) -> int:
        """Queue a job of somebody else's on all nodes; return its number."""
        words = ["sbatch", "--parsable", _ALL_SLOTS, "--output=/dev/null", *options]
        return int(self.cluster.run(*words, f"--wrap=sleep {seconds}").stdout)

    def wait_for_end(self, trial: int, num_batches: int) -> str:
        """Wait until a trial has ended, and its nodes are free; say how, and in how many jobs."""
        text = super().wait_for_end(trial, num_batches)
        num_jobs = len(self.jobs_of(trial))
        return f"{text}, {num_jobs} job{'s' if num_jobs != 1 else ''}"


def _refused(stage: SlurmStage, what: str, changes: Mapping[str, Any]) -> Row:
    before = stage.jobs("--states=all")
    row = master_scenarios.refused(stage, what, changes)
    queued = "nothing" if stage.jobs("--states=all") == before else "a job"
    return Row(row.what, row.seconds, row.line, f"{row.outcome}, {queued} is queued")


def _never_fits(stage: SlurmStage) -> Row:
    return _refused(stage, "7 slots of a cluster that has 6", {"resources": {"slots_per_trial": 7}})


def _one_node(stage: SlurmStage) -> Row:
    changes = {"resources": {"slots_per_trial": 3, "is_single_node": True}}
    return _refused(stage, "3 slots on one node, of nodes that have 2", changes)


def _partition(stage: SlurmStage) -> Row:
    changes = {"slurm": {"sbatch_args": ["--partition=nope"]}}
    return _refused(stage, "a partition that does not exist", changes)


def _waits(stage: SlurmStage) -> Row:
    other = stage.hold()
    stage.cluster.wait_for_state(other, "RUNNING")
    began_s = time.monotonic()
    trial = stage.create(5)
    line = stage.wait_for_line(trial, r"pending \(Resources")
    seconds = {"said why": since(began_s)}
    began_s = time.monotonic()
    stage.cluster.run("scancel", str(other))
    stage.wait_for_batch(trial, 1)
    seconds["first batch after they are free"] = since(began_s)
    return Row("all nodes are taken", seconds, line, stage.wait_for_end(trial, 5))


def _unequal(stage: SlurmStage) -> Row:
    began_s = time.monotonic()
    trial = stage.create(20, 3, slurm={"sbatch_args": ["--ntasks=3", "--nodes=2"]})
    stage.wait_for_batch(trial, 1)
    seconds = {"first batch": since(began_s)}
    line = stage.wait_for_line(trial, " on agent ")
    return Row("3 slots on nodes of 2 and 1", seconds, line, stage.wait_for_end(trial, 20))


def _preempt(stage: SlurmStage) -> Row:
    trial = stage.create(80, min_checkpoint_period={"batches": 1000})
    stage.wait_for_batch(trial, 15)
    began_s = time.monotonic()
    other = stage.hold("--partition=high", seconds=5)
    line = stage.wait_for_line(trial, _ASKED_TO_SAVE)
    seconds = {"asked to save": since(began_s)}
    stage.cluster.wait_for_state(other, "RUNNING", "COMPLETED")
    seconds["the other job has all nodes, for 5 s"] = since(began_s)
    stage.wait_for_line(trial, RESUMED)
    seconds["resumed in another job"] = since(began_s)
    return Row("a partition of higher priority takes its node", seconds, line, stage.wait_for_end(trial, 80))


def _scancel(stage: SlurmStage) -> Row:
    trial = stage.create(80, min_checkpoint_period={"batches": 1000})
    stage.wait_for_batch(trial, 15)
    (job,) = stage.jobs()
    began_s = time.monotonic()
    stage.cluster.run("scancel", job)
    line = stage.wait_for_line(trial, _ASKED_TO_SAVE)
    seconds = {"asked to save": since(began_s)}
    stage.wait_for_line(trial, RESUMED)
    seconds["resumed in another job"] = since(began_s)
    return Row("`scancel` of its job", seconds, line, stage.wait_for_end(trial, 80))


def _time_limit(stage: SlurmStage) -> Row:
    options = {"sbatch_args": ["--time=1"]}
    trial = stage.create(150, slurm=options, min_checkpoint_period={"batches": 1000})
    stage.wait_for_batch(trial, 1)
    began_s = time.monotonic()
    line = stage.wait_for_line(trial, _ASKED_TO_SAVE)
    seconds = {"asked to save, from the first batch": since(began_s)}
    began_s = time.monotonic()
    stage.wait_for_line(trial, RESUMED)
    seconds["resumed in another job, from that"] = since(began_s)
    return Row("near its time limit of a minute", seconds, line, stage.wait_for_end(trial, 150))


def _controller(stage: SlurmStage) -> Row:
    running = stage.create(150)
    stage.wait_for_batch(running, 15)
    stage.cluster.end_controller()
    try:
        began_s = time.monotonic()
        waits = stage.create(5)
        seconds = {"`det experiment create` is taken": since(began_s)}
        line = stage.wait_for_line(waits, "waiting for Slurm: ")
        seconds["said why it waits"] = since(began_s)
    finally:
        stage.cluster.start_controller()
    began_s = time.monotonic()
    stage.wait_for_batch(waits, 1)
    seconds["first batch after it is there again"] = since(began_s)
    outcome = f"{stage.wait_for_end(waits, 5)}; what ran: {stage.wait_for_end(running, 150)}"
    what = "the controller is killed under one trial, another one is submitted, it is started again"
    return Row(what, seconds, line, f"{outcome}, begun {stage.num_begun(running)} time(s)")


def _kill_master(stage: SlurmStage) -> Row:
    two_nodes = {"sbatch_args": ["--nodes=2", "--ntasks-per-node=1"]}
    trial = stage.create(120, 2, slurm=two_nodes)
    return master_scenarios.kill_master(stage, trial, 120, lambda _: {})


def _cut(stage: SlurmStage) -> Row:
    trial = stage.create(
        80,
        2,
        slurm={"slots_per_node": 1, "sbatch_args": ["--exclude=host1"]},
        data={"dstrial": {"min_slots": 1}},
    )
    stage.wait_for_batch(trial, 15)
    host = stage.machines[3]
    began_s = time.monotonic()
    host.cut()
    try:
        line = stage.wait_for_line(trial, rf"{host.name} .*is lost")
        seconds = {"named": since(began_s)}
        stage.wait_for_line(trial, RESUMED)
        seconds["resumed on the node that is left"] = since(began_s)
        outcome = stage.wait_for_end(trial, 80)
    finally:
        host.heal()
    return Row("the cable of one of its two nodes is cut, `min_slots` 1", seconds, line, outcome)


class _Run:
    """``dstrial run --slurm`` on two nodes, in a directory of its own."""

    def __init__(self, stage: SlurmStage, name: str) -> None:
        self._cluster, self.place = stage.cluster, stage.master.place / name
        self.place.mkdir()
        shutil.copy(stage.master.model / "small_trial.py", self.place)
        (self.place / "exp.yaml").write_text(yaml.safe_dump({**CONFIG, "scheduling_unit": 1}))

    def begin(self, batches: int, *flags: str) -> SlurmRun:
        """Type the command."""
        return SlurmRun(self._cluster, self.place, *TWO_NODES, *flags, batches=batches, pause_s=_SLOW_S)

    def outcome(self, run: SlurmRun, num_batches: int) -> str:
        """Wait for the command's end; say how it and the run have ended."""
        code, text = run.end()
        directory = run_directory(self.place)
        state = json.loads((directory / "run.json").read_text())["state"]
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        batches = [row["steps_completed"] for row in rows if row["group"] == "training"]
        restarts = len(re.findall(r"restart \d+ of \d+ on", text))
        said = f"exit code {code}, {state}, {counted(batches, num_batches)}, {restarts} restarts"
        return f"{said}, {text.count(f'INFO: {RESUMED}')} times from a checkpoint"


def _line(text: str, part: str) -> str:
    """Return the last line that has something."""
    return next(line for line in reversed(text.splitlines()) if part in line)


def _run_preempted(stage: SlurmStage) -> Row:
    made = _Run(stage, "preempted")
    run = made.begin(60)
    run.wait_for("batch 15 loss")
    began_s = time.monotonic()
    stage.hold("--partition=high", seconds=5)
    run.wait_for("is queued again, because")
    seconds = {"saved, and queued again": since(began_s)}
    line = _line(run.text, "is queued again, because")
    run.wait_for(f"INFO: {RESUMED}")
    seconds["goes on"] = since(began_s)
    return Row("`dstrial run --slurm`: preempted for 5 s", seconds, line, made.outcome(run, 60))


def _run_cancelled(stage: SlurmStage) -> Row:
    made = _Run(stage, "cancelled")
    run = made.begin(60)
    run.wait_for("batch 15 loss")
    began_s = time.monotonic()
    stage.cluster.run("scancel", str(run.job_id))
    code, text = run.end()
    seconds = {"saved, and ended": since(began_s)}
    state = stage.cluster.job(run.job_id)["JobState"]
    began_s = time.monotonic()
    run = made.begin(60, "--resume", "latest")
    run.wait_for(f"INFO: {RESUMED}")
    seconds["goes on, from `--resume latest`"] = since(began_s)
    outcome = f"exit code {code}, job {state}; resumed: {made.outcome(run, 60)}"
    return Row("`dstrial run --slurm`: `scancel`", seconds, _line(text, "stopped at batch"), outcome)


def _run_cut(stage: SlurmStage) -> Row:
    made = _Run(stage, "cut")
    run = made.begin(80, "--sbatch-arg=--nodelist=host1,host2")
    run.wait_for("batch 15 loss")
    host = stage.machines[2]
    began_s = time.monotonic()
    host.cut()
    try:
        run.wait_for(" is lost: ")
        seconds = {"named": since(began_s)}
        line = _line(run.text, " is lost: ")
        run.wait_for(f"INFO: {RESUMED}")
        seconds["the rest goes on"] = since(began_s)
        # Where Slurm ends the job for its node it is queued again, and waits for two.
        stage.wait(lambda: run.process.poll() is not None or not stage.jobs("--states=running"), "its end")
    finally:
        host.heal()
    outcome = made.outcome(run, 80)
    return Row("`dstrial run --slurm`: the cable of one of its two nodes is cut", seconds, line, outcome)


SCENARIOS: dict[str, Callable[[SlurmStage], Row]] = {
    "submit": master_scenarios.submit,
    "never fits": _never_fits,
    "one node": _one_node,
    "partition": _partition,
    "waits": _waits,
    "unequal": _unequal,
    "pause": master_scenarios.pause,
    "kill": master_scenarios.kill_trial,
    "disable": master_scenarios.disable,
    "preempt": _preempt,
    "scancel": _scancel,
    "time limit": _time_limit,
    "controller": _controller,
    "master": _kill_master,
    "cut": _cut,  # behind the others of the master's: it asks for the node no more for ten minutes
    "run preempted": _run_preempted,
    "run cancelled": _run_cancelled,
    "run cut": _run_cut,
}


def _then_idle(scenario: Callable[[SlurmStage], Row]) -> Callable[[SlurmStage], Row]:
    """Let the next scenario have all nodes."""

    def done(stage: SlurmStage) -> Row:
        row = scenario(stage)
        stage.cluster.wait_for_idle(len(stage.machines.all), timeout=_IDLE_WITHIN_S)
        return row

    return done


@contextlib.contextmanager
def _stage() -> Iterator[SlurmStage]:
    with (
        slurm_cluster(3, grace_s=_GRACE_S) as cluster,
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory,
    ):
        variables = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
        master = MasterOnHosts(cluster.machines, Path(directory), slurm=variables)
        master_scenarios.begin(master, "dstrial up --backend slurm")
        yield SlurmStage(cluster, master)
        master.down("--now")


if __name__ == "__main__":
    scenarios = {name: _then_idle(scenario) for name, scenario in SCENARIOS.items()}
    master_scenarios.measure(__doc__, missing, _stage, scenarios)
