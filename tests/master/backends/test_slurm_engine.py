"""Slurm engine without a cluster: batch scripts, job states and refusals."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.errors import ConfigError
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import EngineRefusedError, JobRequest, NodeCapacity, Part
from dstrial.master.backends.queued.slurm import (
    SlurmEngine,
    parts_of,
    refusal_of,
    script_of,
    state_of,
    text_of,
    wants_devices,
)
from dstrial.slurm.jobs import Job

pytestmark = pytest.mark.process

_PLACE = Path("/shared/my state/slurm")


def script(request: JobRequest, settings: dict[str, object] | None = None) -> list[str]:
    text = script_of(request, settings or {}, "trial-7@1f2a3b4c", _PLACE)
    subprocess.run(["bash", "-n", "-c", text], check=True)
    return text.splitlines()


def test_script_requests_nodes_and_names_trial() -> None:
    lines = script(JobRequest("trial-7", "trial 7 of experiment 2 (gpt)", 4))
    assert lines[1] == "# For trial 7 of experiment 2 (gpt); written by the master of /shared/my state."
    assert "#SBATCH --job-name=trial-7@1f2a3b4c" in lines
    assert "#SBATCH --ntasks=4" in lines
    assert '#SBATCH --output="/shared/my state/slurm/%j.log"' in lines
    assert "#SBATCH --no-requeue" in lines
    assert "cd '/shared/my state/slurm' || exit 1" in lines
    assert "#SBATCH --nodes=1" not in lines
    assert "#SBATCH --nodes=1" in script(JobRequest("command-x", "t", 2, is_on_one_node=True))


def test_experiment_sbatch_args_follow_and_override_master_options() -> None:
    request = JobRequest(
        "trial-7",
        "t",
        8,
        excluded_nodes=frozenset({"n2"}),
        wants_devices=True,
        settings={"sbatch_args": ["-p", "gpu", "--exclude=n9"], "slots_per_node": 4},
    )
    options = [
        line.removeprefix("#SBATCH ")
        for line in script(request, {"sbatch_args": ["--account=us", "-p", "cpu"], "gpu_type": "a100"})
        if line.startswith("#SBATCH ")
    ]
    assert options[-5:] == ["--account=us", "-p cpu", "-p gpu", "--exclude=n9", "--exclude=n2,n9"]
    assert {"--ntasks=8", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-task=a100:1"} <= set(options)


def test_script_refuses_job_arrays_and_uneven_nodes() -> None:
    with pytest.raises(EngineRefusedError, match=r"sbatch_args has --array=1-3; expected none of these"):
        script(JobRequest("trial-7", "t", 1, settings={"sbatch_args": ["--array=1-3"]}))
    with pytest.raises(ConfigError, match=r"the experiment.s config: slurm\.slots_per_node is 3"):
        script(JobRequest("trial-7", "t", 4, settings={"slots_per_node": 3}))


def test_parts_of_parses_node_list() -> None:
    assert parts_of("host[1-2],host7 2(x2),1\n") == (Part("host1", 2), Part("host2", 2), Part("host7", 1))
    for text in ("", "host1", "host[1-2] 2", "host[ 2"):
        with pytest.raises(ValueError, match=r"names no nodes|no list"):
            parts_of(text)


def test_job_state_and_text_include_slurm_reason() -> None:
    for job, state, text in (
        (
            Job("7", "PENDING", "Resources"),
            "pending",
            ": pending (Resources)",
        ),
        (Job("7", "CONFIGURING"), "pending", ": configuring"),
        (Job("7", "RUNNING", nodes="host1"), "running", ": running on host1"),
        (Job("7", "RUNNING", is_preempted=True), "leaving", " is preempted: another job gets its nodes"),
        (Job("7", "COMPLETING"), "leaving", " is being ended (completing)"),
        (Job("7", "CANCELLED"), "ended", " has ended: cancelled"),
        (Job("7", "NODE_FAIL"), "ended", " has ended: node fail"),
        (Job("7", "PREEMPTED"), "ended", " has ended: preempted"),
    ):
        assert (state_of(job), text_of(job)) == (state, f"job 7{text}")


def test_text_of_launch_failure_suggests_shared_directory() -> None:
    failed = Job("17", "FAILED", "JobLaunchFailure", nodes="host2")
    assert text_of(failed, _PLACE) == (
        "job 17 has ended: failed (JobLaunchFailure), and has written nothing into /shared/my state/slurm: most likely host2 "
        "does not see this directory. Start the master with a --state-dir that all nodes mount"
    )
    for other in (Job("17", "CANCELLED", nodes="host2"), Job("17", "PENDING", "Resources")):
        assert text_of(other, _PLACE) == text_of(other)


def test_wants_devices_if_options_request_gpus() -> None:
    assert wants_devices({"sbatch_args": ["--gres=gpu:2"]}, {})
    assert wants_devices({"gpu_type": "a100"}, {})
    assert not wants_devices({"gpu_type": "a100"}, {"DS_ACCELERATOR": "cpu"})


def test_refusal_of_names_offending_config_key() -> None:
    no_nodes = "allocation failure: Requested node configuration is not available"
    options = {"sbatch_args": ["--partition=nope"]}
    found = refusal_of(
        JobRequest("check", "t", 1, settings=options),
        "sbatch says: invalid partition specified: nope",
        "Fix.",
    )
    assert found == Refusal(
        "slurm.sbatch_args",
        '["--partition=nope"]',
        "options with which Slurm takes a job of 1 slot; sbatch says: invalid partition specified: nope",
        "Fix.",
    )
    for settings, said, key, got in (
        (options, no_nodes, "slurm.sbatch_args", '["--partition=nope"]'),
        ({}, no_nodes, "resources.slots_per_trial", "3"),
        ({"gpu_type": "x9"}, "Invalid generic resource", "slurm", '{"gpu_type": "x9"}'),
        ({}, "invalid partition specified: low", "slurm.sbatch_args", "not given"),
    ):
        found = refusal_of(JobRequest("check", "t", 3, settings=settings), said, "Fix.")
        assert (found.key, found.got) == (key, got)
        assert found.is_for_nodes == ("partition" not in said)


@pytest.fixture
def engine(tmp_path: Path) -> SlurmEngine:
    return SlurmEngine(tmp_path / "slurm", "c", {}, wants_devices=False)


def test_nodes_includes_down_and_drained_nodes(
    engine: SlurmEngine, fake_command: Callable[[str, str], None]
) -> None:
    fake_command(
        "sinfo", "echo 'host1|idle|4|(null)'; echo 'host2|drained|2|(null)'; echo 'host3|down*|8|(null)'"
    )
    assert engine.nodes() == {
        "host1": NodeCapacity(4),
        "host2": NodeCapacity(2, is_up=False),
        "host3": NodeCapacity(8, is_up=False),
    }


@pytest.mark.parametrize("ask", [SlurmEngine.nodes, SlurmEngine.jobs])
def test_engine_touches_alive_file_while_slurm_unreachable(
    engine: SlurmEngine,
    fake_command: Callable[[str, str], None],
    tmp_path: Path,
    ask: Callable[[SlurmEngine], object],
) -> None:
    for name in ("sinfo", "squeue"):
        fake_command(name, "echo 'Unable to contact slurm controller' >&2\nexit 1")
    with pytest.raises(ConnectionError, match="Unable to contact"):
        ask(engine)
    assert (tmp_path / "slurm" / "alive").exists()
