"""Forked ranks and ranks in new processes train bitwise equally."""

import json
import subprocess
import sys

import pytest
import torch
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


def tensors(value, at=""):
    """Yield (path, tensor) of each tensor in nested containers."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from tensors(item, f"{at}/{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{at}/{index}")
    elif isinstance(value, torch.Tensor):
        yield at, value


def weights_of(directory):
    """Return file and path -> tensor of all ``*.pt`` files below a directory."""
    return {
        f"{path.relative_to(directory)}{at}": value
        for path in sorted(directory.rglob("*.pt"))
        for at, value in tensors(torch.load(path, map_location="cpu", weights_only=False))
    }


def last_checkpoint(run):
    marks = run.directory.checkpoints_path.glob("*/COMPLETE")
    return max(marks, key=lambda mark: json.loads(mark.read_text())["steps_completed"]).parent


def assert_equal_weights(one, other):
    assert one
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


CASES = [
    pytest.param("WitnessTrial", 0, {}, 2, id="ZeRO 0"),
    pytest.param(
        *("WitnessTrial", 1, {"start_method": "forkserver", "noise": 0.1}, 2),
        id="ZeRO 1 and loader workers of a fork server",
    ),
    pytest.param("WitnessTrial", 2, {"dropout": 0.5}, 2, id="ZeRO 2 and more dropout"),
    pytest.param("WitnessTrial", 3, {}, 2, id="ZeRO 3"),
    pytest.param("WitnessPipeline", 0, {}, 2, id="a pipeline of two stages"),
    pytest.param("WitnessTrial", 0, {"start_method": "fork", "noise": 0.1}, 1, id="forked loader workers"),
    pytest.param(
        # A single worker and a single epoch, because each spawned worker imports torch.
        *("WitnessTrial", 0, {"start_method": "spawn", "noise": 0.1, "num_workers": 1, "num_records": 56}, 1),
        id="a spawned loader worker",
    ),
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
    assert_equal_weights(weights_of(last_checkpoint(executed)), weights_of(last_checkpoint(forked)))
