"""Train the small trials on several ranks with ``python -m dstrial.launch``."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import warm_start
import yaml

from dstrial.local.run_directory import RunDirectory

DEFINITIONS = pathlib.Path(__file__).parents[1] / "programs"
TIMINGS = {"batches_per_second", "samples_per_second"}


def complete_steps(run_path):
    """Return the batches of the complete checkpoints of a run directory, ascending."""
    marks = pathlib.Path(run_path).glob("checkpoints/*/COMPLETE")
    return sorted(json.loads(mark.read_text())["steps_completed"] for mark in marks)


@dataclasses.dataclass
class Run:
    directory: RunDirectory
    output: str
    returncode: int

    def rows(self, group):
        lines = self.directory.metrics_path.read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["group"] == group]

    def reports(self, group):
        """Return batch -> metrics without timings, in the order of the file."""
        return {
            row["steps_completed"]: {k: v for k, v in row["metrics"].items() if k not in TIMINGS}
            for row in self.rows(group)
        }

    def checkpoints(self):
        return complete_steps(self.directory.path)


def deepspeed_config(stage=0, **sections):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        **sections,
    }


def experiment(hyperparameters, batches, report=7, validate=8, checkpoint=5, **fields):
    return {
        "name": "small",
        "entrypoint": "small_trials:DataParallelTrial",
        "hyperparameters": hyperparameters,
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": batches}},
        "scheduling_unit": report,
        "min_validation_period": {"batches": validate},
        "min_checkpoint_period": {"batches": checkpoint},
        "reproducibility": {"experiment_seed": 3},
        **fields,
    }


def prepare(tmp_path, trial, config, ranks, run=None, env=None, context_dir=DEFINITIONS):
    """Return (run directory, words after ``python -m``, environment) of a launcher.

    ``trial`` is ``module:Class``. ``run`` is a run to resume from its newest checkpoint.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    config_path = tmp_path / "experiment.yaml"
    config_path.write_text(yaml.safe_dump(config))
    directory = (
        run.directory
        if run
        else RunDirectory.create(
            tmp_path / "runs", name="small", context_dir=context_dir, command=["test"], config=config
        )
    )
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_RUN_DIR": str(directory.path),
        "DSTRIAL_TIMEOUT_S": "100",
        **({"DSTRIAL_RESUME": "latest"} if run else {}),
        **(env or {}),
    }
    words = ["dstrial.launch", "--slots", str(ranks), "--config", str(config_path)]
    words += ["--context-dir", str(context_dir), "--trial", trial]
    return directory, words, environ


def train(
    tmp_path,
    trial,
    config,
    ranks=1,
    run=None,
    env=None,
    timeout_s=200,
    context_dir=DEFINITIONS,
    module="small_trials",
    run_program=warm_start.run,
):
    """Train, or resume ``run`` from its newest checkpoint; return the run.

    ``run_program`` has the signature of ``warm_start.run``.
    """
    directory, words, environ = prepare(
        tmp_path, f"{module}:{trial}", config, ranks, run, env, context_dir=context_dir
    )
    done = run_program(words, env=environ, cwd=tmp_path, timeout=timeout_s)
    return Run(directory, done.stdout + done.stderr, done.returncode)


def start(tmp_path, trial, config, **variables):
    """Start ``module:Class`` on two ranks; return process, run directory, output file."""
    directory, words, environ = prepare(tmp_path, trial, config, 2, env=variables)
    with (tmp_path / "output").open("w") as output:
        process = warm_start.Popen(
            [sys.executable, "-m", *words],
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    return process, directory, tmp_path / "output"


def submit(master, tmp_path, config):
    """Submit an experiment of the small trials to a master; return its id."""
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(config))
    created = master.det("experiment", "create", str(path), str(DEFINITIONS))
    assert created.returncode == 0, created.stdout + created.stderr
    return int(created.stdout.split("Created experiment ")[1].split()[0])
