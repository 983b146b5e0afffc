"""Show that a Trainer which is paused and goes on has the losses of one that is never paused, on the same slots and on others.

``python benchmarks/hf_resume.py [--example hf_clm|hf_image] [--cases zero2 zero3 …] [--asha]`` starts a master of its own, runs
the example with ``dstrial run``, pauses it with Ctrl-C as soon as a few steps are reported, goes on with
``--resume latest --slots N`` and compares the losses of every step (``logging_steps`` 1) and of every evaluation. It also
downloads and exports the last checkpoint and loads it with ``from_pretrained``, and with ``--asha`` runs the example's search
of 8 trials.
The models compute in float32 and have no dropout; on other slots gradients are summed in another order, so that losses may
differ in their last digits, and the more so the more steps follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.testing.master import MasterForTest, master_for_test

ROOT = Path(__file__).resolve().parents[1]
PAUSE_AFTER = 3
DEADLINE_S = 600.0
# (ZeRO stage, slots of the first attempt, slots of the second)
CASES = {
    "zero1": [(1, 1, 1), (1, 2, 2)],
    "zero2": [(2, 1, 1), (2, 2, 2), (2, 2, 1), (2, 1, 2)],
    "zero3": [(3, 1, 1), (3, 2, 2), (3, 2, 1), (3, 1, 2)],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Shortened:
    """How an example is made small enough to be run many times, and long enough to be paused.

    Attributes:
        num_steps: steps of a run.
        batch_size: records of a batch, on any number of slots.
        hyperparameters: in place of the shipped config's.
        searched: the same for its search.
        model_class: of transformers, which loads what is exported.
    """

    num_steps: int
    batch_size: int
    hyperparameters: Mapping[str, Any]
    searched: Mapping[str, Any]
    model_class: str


_SMALL_TEXT = {"block_size": 32, "num_eval_blocks": 16, "num_chars_max": 100000}
EXAMPLES = {
    "hf_clm": Shortened(
        10,
        8,
        {"n_layer": 2, "n_embd": 32, **_SMALL_TEXT},
        {"n_layer": 1, **_SMALL_TEXT},
        "AutoModelForCausalLM",
    ),
    "hf_image": Shortened(120, 32, {"num_layers": 2}, {}, "AutoModelForImageClassification"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run directory says.

    Attributes:
        path: the run directory.
        losses: training loss by step.
        evaluations: ``eval_loss`` by step.
    """

    path: Path
    losses: dict[int, float]
    evaluations: dict[int, float]

    @classmethod
    def of(cls, path: Path) -> Outcome:
        """Read the reports of a run directory."""
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        values: dict[str, dict[int, float]] = {"training": {}, "validation": {}}
        for row in rows:
            name = "loss" if row["group"] == "training" else "eval_loss"
            values[row["group"]][row["steps_completed"]] = row["metrics"][name]
        return cls(path, values["training"], values["validation"])


def config(name: str, example: str, stage: int, slots: int) -> dict[str, Any]:
    """The shipped config of an example, shortened and with every step reported; the same batch on any number of slots."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "experiment_configs" / f"{example}.yaml").read_text())
    shortened = EXAMPLES[example]
    flags = {
        "--max_steps": shortened.num_steps,
        "--logging_steps": 1,
        "--eval_steps": shortened.num_steps // 2,
        "--save_steps": 1000,
        "--per_device_train_batch_size": shortened.batch_size // slots,
    }
    words = values["entrypoint"].split()
    for flag, value in flags.items():
        words[words.index(flag) + 1] = str(value)
    values |= {"name": name, "entrypoint": " ".join(words), "resources": {"slots_per_trial": slots}}
    values["searcher"]["max_length"] = {"batches": shortened.num_steps}
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    values["hyperparameters"] |= {
        "overwrite_deepspeed_args": {"zero_optimization": zero},
        **shortened.hyperparameters,
    }
    return values


class Example:
    """Runs configs of an example against a master and reads what becomes of them."""

    def __init__(self, name: str, master: MasterForTest, directory: Path) -> None:
        self._name = name
        self._master = master
        self._definition = ROOT / "model_defs" / name
        self._directory = directory
        self._env: Mapping[str, str] = {**master.env, "DSTRIAL_RUNS_DIR": str(directory / "runs")}

    def start(self, values: Mapping[str, Any], *options: str) -> subprocess.Popen[bytes]:
        """Start ``dstrial run`` with a config."""
        path = self._directory / f"{values['name']}.yaml"
        path.write_text(yaml.safe_dump(dict(values), sort_keys=False))
        command = [
            sys.executable,
            "-m",
            "dstrial.cli",
            "run",
            str(path),
            str(self._definition),
            "--no-progress",
            *options,
        ]
        log = (self._directory / f"{values['name']}.log").open("ab")
        return subprocess.Popen(command, env=self._env, cwd=self._directory, stdout=log, stderr=log)

    def wait(self, process: subprocess.Popen[bytes], name: str, *expected: int) -> None:
        """Wait for its end; leave with its log if it ends otherwise than expected."""
        code = process.wait(timeout=DEADLINE_S)
        if code not in expected:
            log = (self._directory / f"{name}.log").read_text(errors="replace")
            raise SystemExit(f"{name} exited with {code}; its log ends:\n{log[-3000:]}")

    def directory_of(self, name: str) -> Path:
        """Return the run directory of a config."""
        (found,) = (self._directory / "runs" / name).iterdir()
        return found

    def whole(self, stage: int, slots: int) -> Outcome:
        """Run without a pause."""
        name = f"whole-{stage}-{slots}"
        self.wait(self.start(config(name, self._name, stage, slots)), name, 0)
        return Outcome.of(self.directory_of(name))

    def paused(self, stage: int, before: int, after: int) -> tuple[Outcome, int]:
        """Return the outcome and the step at which it was paused."""
        name = f"paused-{stage}-{before}-{after}"
        values = config(name, self._name, stage, before)
        process = self.start(values)
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not self._num_reports(name) >= PAUSE_AFTER:
            if process.poll() is not None or time.monotonic() > give_up_at_s:
                self.wait(process, name)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        self.wait(process, name, 130, 0)
        paused_at = max(Outcome.of(self.directory_of(name)).losses)
        if paused_at == EXAMPLES[self._name].num_steps:
            raise SystemExit(f"{name} had trained to its end before it could be paused")
        self.wait(self.start(values, "--resume", "latest", "--slots", str(after)), name, 0)
        return Outcome.of(self.directory_of(name)), paused_at

    def _num_reports(self, name: str) -> int:
        found = list((self._directory / "runs" / name).glob("*/metrics.jsonl"))
        return len(found[0].read_text().splitlines()) if found else 0

    def exported(self, outcome: Outcome) -> str:
        """Download the last checkpoint and export it; return what transformers says of it: parameters, and what was missing."""
        newest = newest_checkpoint(outcome.path / "checkpoints")
        assert newest is not None
        downloaded, target = outcome.path / "downloaded", outcome.path / "exported"
        ended = self._master.det("checkpoint", "download", newest.path.name, "-o", str(downloaded))
        if ended.returncode != 0:
            raise SystemExit(f"det checkpoint download failed: {ended.stdout}{ended.stderr}")
        command = [sys.executable, "-m", "dstrial.cli", "checkpoint", "export", str(downloaded), str(target)]
        subprocess.run(
            [*command, "--format", "hf", "--no-progress"], env=self._env, check=True, capture_output=True
        )
        load = (
            f"import sys; from transformers import {EXAMPLES[self._name].model_class} as A; "
            "m, i = A.from_pretrained(sys.argv[1], output_loading_info=True); "
            "print(sum(p.numel() for p in m.parameters()), [k for k, v in i.items() if v])"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", load, str(target)],
            env=self._env,
            check=True,
            capture_output=True,
            text=True,
        )
        return loaded.stdout.strip()

    def search(self) -> str:
        """Run the shipped search, on a smaller model; return its table."""
        path = ROOT / "experiment_configs" / f"{self._name}_asha.yaml"
        command = [
            sys.executable,
            "-m",
            "dstrial.cli",
            "run",
            str(path),
            str(self._definition),
            "--no-progress",
        ]
        for name, value in EXAMPLES[self._name].searched.items():
            command += ["--config", f"hyperparameters.{name}={value}"]
        done = subprocess.run(command, env=self._env, cwd=self._directory, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return done.stdout[done.stdout.index("\ntrial ") :]


def compare(whole: Outcome, other: Outcome, after_step: int = 0) -> str:
    """Return the largest differences of the losses, in numbers and in words.

    Args:
        whole: an uninterrupted run.
        other: the run to compare with it.
        after_step: the step at which the other one was paused.
    """
    assert whole.losses.keys() == other.losses.keys(), (whole.losses, other.losses)
    assert whole.evaluations.keys() == other.evaluations.keys(), (whole.evaluations, other.evaluations)
    by_step = {step: abs(other.losses[step] - loss) for step, loss in whole.losses.items()}
    first = max(by_step[step] for step in list(by_step)[after_step : after_step + 3])
    evaluation = max(abs(other.evaluations[step] - loss) for step, loss in whole.evaluations.items())
    largest = max(by_step.values())
    words = (
        "equal, bit by bit"
        if largest == evaluation == 0
        else "equal but for rounding"
        if first < 1e-5
        else "DIFFERENT"
    )
    return f"{first:.2e}  {largest:.2e}  {evaluation:.2e}  {words}"


def main() -> None:
    """Run what the command line asks for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--example", choices=tuple(EXAMPLES), default="hf_clm")
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--asha", action="store_true", help="run the search of 8 trials too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dstrial-hf-") as made:
        directory = Path(made)
        env = {
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        with master_for_test(directory, num_slots=2, env=env) as master:
            example = Example(args.example, master, directory)
            print(
                "ZeRO  slots   paused at  largest difference: in the 3 steps that follow, in all, of eval_loss"
            )
            wholes: dict[tuple[int, int], Outcome] = {}
            for case in args.cases:
                for stage, before, after in CASES[case]:
                    if (stage, before) not in wholes:
                        wholes[stage, before] = example.whole(stage, before)
                    outcome, step = example.paused(stage, before, after)
                    result = compare(wholes[stage, before], outcome, step)
                    print(f"{stage:4}  {before} -> {after}  step {step:4}  {result}", flush=True)
            for stage in sorted({stage for stage, _ in wholes}):
                if {(stage, 1), (stage, 2)} <= wholes.keys():
                    result = compare(wholes[stage, 1], wholes[stage, 2])
                    print(f"{stage:4}  1 and 2, both uninterrupted  {result}", flush=True)
            for (stage, slots), outcome in wholes.items():
                print(
                    f"from_pretrained of ZeRO {stage} on {slots} slots: {example.exported(outcome)}",
                    flush=True,
                )
            if args.asha:
                print(example.search())


if __name__ == "__main__":
    main()
