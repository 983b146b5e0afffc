"""Forked ranks and ranks in new processes train bitwise equally."""

import json
import subprocess
import sys

import pytest
import warm_start
from small_runs import deepspeed_config, experiment, train

from dstrial.harness_paths import WARM_VARIABLE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

DEADLINE_S = 280
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def server():
    """The test session's fork server."""
    return warm_start.fork_server()


def new_process(arguments, *, env, cwd, timeout):
    """Run ``python -m ARGUMENTS`` in a new process without preloaded modules."""
    command = [sys.executable, "-m", *arguments]
    kept = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.run(
        command,
        env={**kept, **VARIABLES, WARM_VARIABLE: "0"},
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def fork_runner(server):
    """Return a function that runs ``python -m ARGUMENTS`` as a fork of ``server``."""

    def run(arguments, *, env, cwd, timeout):
        command = [sys.executable, "-m", *arguments]
        reasons = []
        with warm_start.ForkedPopen(
            server,
            command,
            told=reasons.append,
            env={**env, **VARIABLES},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as program:
            try:
                texts = program.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                program.kill()
                raise
        assert not reasons
        assert "starts as a new process" not in "".join(texts)
        return subprocess.CompletedProcess(command, program.returncode, *texts)

    return run


def train_both(server, tmp_path, trial, config, ranks):
    """Train in new processes, then in forks; return both runs."""
    runs = []
    for name, run_program in (("executed", new_process), ("forked", fork_runner(server))):
        directory = tmp_path / name
        witnesses = directory / "witnesses"
        witnesses.mkdir(parents=True)
        run = train(
            directory,
            trial,
            config,
            ranks=ranks,
            module="witness_trials",
            env={"WITNESS_DIR": str(witnesses)},
            timeout_s=DEADLINE_S,
            run_program=run_program,
        )
        assert run.returncode == 0, run.output
        assert [path.read_text() for path in sorted(witnesses.iterdir())] == [name] * ranks
        runs.append(run)
    return runs


def engine_checksums(run):
    """Return file -> SHA-256 of the engine's files in the newest checkpoint."""
    manifests = map(
        json.loads, (path.read_text() for path in run.directory.checkpoints_path.glob("*/manifest.json"))
    )
    files = max(manifests, key=lambda manifest: manifest["steps_completed"])["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.startswith("model0/")}


CASES = [
    pytest.param("WitnessTrial", 0, {}, 2, id="ZeRO 0"),
    pytest.param(
        *("WitnessTrial", 1, {"start_method": "forkserver", "noise": 0.1}, 2),
        id="ZeRO 1 and loader workers of a fork server",
    ),
    pytest.param("WitnessTrial", 3, {}, 2, id="ZeRO 3"),
    pytest.param("WitnessPipeline", 0, {}, 2, id="a pipeline of two stages"),
]


# tests/master/test_unchanged_code.py tests a forked script that spawns loader workers.
@pytest.mark.exhaustive("[ZeRO 3]")
@pytest.mark.parametrize(("trial", "stage", "hyperparameters", "ranks"), CASES)
def test_forked_ranks_train_bitwise_equally(server, tmp_path, trial, stage, hyperparameters, ranks):
    given = {"deepspeed_config": deepspeed_config(stage), "num_records": 40, **hyperparameters}
    config = experiment(given, batches=6, report=1, validate=3, checkpoint=6)

    executed, forked = train_both(server, tmp_path, trial, config, ranks)

    assert list(executed.reports("training")) == [1, 2, 3, 4, 5, 6]
    assert list(executed.reports("validation")) == [3, 6]
    assert forked.reports("training") == executed.reports("training")
    assert forked.reports("validation") == executed.reports("validation")
    assert engine_checksums(forked) == engine_checksums(executed) != {}
