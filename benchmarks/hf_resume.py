"""Show that a Trainer which is paused and goes on has the losses of one that is never paused, on the same slots and on others.

``python benchmarks/hf_resume.py [--cases zero2 zero3 …] [--asha]`` starts a master of its own, runs the example ``hf_clm``
with ``dstrial run``, pauses it with Ctrl-C as soon as a few steps are reported, goes on with ``--resume latest --slots N``
and compares the losses of every step (``logging_steps`` 1). It also exports the last checkpoint and loads it with
``AutoModelForCausalLM.from_pretrained``, and with ``--asha`` runs a search of 8 trials. The model computes in float32 and has no
dropout; on other slots gradients are summed in another order, so that losses may differ in their last digits.
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

from dstrial.testing.master import MasterForTest, master_for_test

ROOT = Path(__file__).resolve().parents[1]
MODEL_DEF = ROOT / "model_defs" / "hf_clm"
NUM_STEPS = 10
PAUSE_AFTER = 3
DEADLINE_S = 600.0
# (ZeRO stage, slots of the first attempt, slots of the second)
CASES = {
    "zero1": [(1, 1, 1), (1, 2, 2)],
    "zero2": [(2, 1, 1), (2, 2, 2), (2, 2, 1), (2, 1, 2)],
    "zero3": [(3, 1, 1), (3, 2, 2), (3, 2, 1), (3, 1, 2)],
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


def config(name: str, stage: int, slots: int) -> dict[str, Any]:
    """The shipped config, shortened and with every step reported; 8 records a batch on any number of slots."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "experiment_configs" / "hf_clm.yaml").read_text())
    flags = {
        "--max_steps": NUM_STEPS,
        "--logging_steps": 1,
        "--eval_steps": NUM_STEPS // 2,
        "--save_steps": 1000,
        "--per_device_train_batch_size": 8 // slots,
    }
    words = values["entrypoint"].split()
    for flag, value in flags.items():
        words[words.index(flag) + 1] = str(value)
    values |= {"name": name, "entrypoint": " ".join(words), "resources": {"slots_per_trial": slots}}
    values["searcher"]["max_length"] = {"batches": NUM_STEPS}
    values["hyperparameters"] |= {
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": stage}},
        "n_layer": 2,
        "n_embd": 32,
        "block_size": 32,
        "num_eval_blocks": 16,
        "num_chars_max": 100000,
    }
    return values


class Example:
    """Runs configs against a master and reads what becomes of them."""

    def __init__(self, master: MasterForTest, directory: Path) -> None:
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
            str(MODEL_DEF),
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
        self.wait(self.start(config(name, stage, slots)), name, 0)
        return Outcome.of(self.directory_of(name))

    def paused(self, stage: int, before: int, after: int) -> tuple[Outcome, int]:
        """Return the outcome and the step at which it was paused."""
        name = f"paused-{stage}-{before}-{after}"
        values = config(name, stage, before)
        process = self.start(values)
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not self._num_reports(name) >= PAUSE_AFTER:
            if process.poll() is not None or time.monotonic() > give_up_at_s:
                self.wait(process, name)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        self.wait(process, name, 130, 0)
        paused_at = max(Outcome.of(self.directory_of(name)).losses)
        self.wait(self.start(values, "--resume", "latest", "--slots", str(after)), name, 0)
        return Outcome.of(self.directory_of(name)), paused_at

    def _num_reports(self, name: str) -> int:
        found = list((self._directory / "runs" / name).glob("*/metrics.jsonl"))
        return len(found[0].read_text().splitlines()) if found else 0

    def exported(self, outcome: Outcome) -> str:
        """Export the last checkpoint; return what transformers says of it: parameters, and what was missing."""
        target = outcome.path / "exported"
        command = [
            sys.executable,
            "-m",
            "dstrial.cli",
            "checkpoint",
            "export",
            str(outcome.path),
            str(target),
        ]
        subprocess.run(
            [*command, "--format", "hf", "--no-progress"], env=self._env, check=True, capture_output=True
        )
        load = (
            "import sys; from transformers import AutoModelForCausalLM as A; "
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
        path = ROOT / "experiment_configs" / "hf_clm_asha.yaml"
        command = [sys.executable, "-m", "dstrial.cli", "run", str(path), str(MODEL_DEF), "--no-progress"]
        small = {"n_layer": 1, "block_size": 32, "num_eval_blocks": 16, "num_chars_max": 100000}
        for name, value in small.items():
            command += ["--config", f"hyperparameters.{name}={value}"]
        done = subprocess.run(command, env=self._env, cwd=self._directory, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return done.stdout[done.stdout.index("\ntrial ") :]


def compare(whole: Outcome, other: Outcome) -> str:
    """Return the largest differences of the losses, in numbers and in words."""
    assert whole.losses.keys() == other.losses.keys(), (whole.losses, other.losses)
    assert whole.evaluations.keys() == other.evaluations.keys(), (whole.evaluations, other.evaluations)
    largest = max(abs(other.losses[step] - loss) for step, loss in whole.losses.items())
    evaluation = max(abs(other.evaluations[step] - loss) for step, loss in whole.evaluations.items())
    words = "equal, bit by bit" if largest == evaluation == 0 else "equal but for rounding"
    return f"{largest:.2e}  {evaluation:.2e}  {words}"


def main() -> None:
    """Run what the command line asks for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            example = Example(master, directory)
            print("ZeRO  slots   paused at  largest difference of loss, eval_loss over all steps")
            wholes: dict[tuple[int, int], Outcome] = {}
            for case in args.cases:
                for stage, before, after in CASES[case]:
                    if (stage, before) not in wholes:
                        wholes[stage, before] = example.whole(stage, before)
                    outcome, step = example.paused(stage, before, after)
                    result = compare(wholes[stage, before], outcome)
                    print(f"{stage:4}  {before} -> {after}  step {step:4}  {result}", flush=True)
            for (stage, slots), outcome in wholes.items():
                print(
                    f"from_pretrained of ZeRO {stage} on {slots} slots: {example.exported(outcome)}",
                    flush=True,
                )
            if args.asha:
                print(example.search())


if __name__ == "__main__":
    main()
