"""Start work with the code of another commit and have this code go on with it: ``python tools/take_back.py COMMIT``.

Three proofs with real processes: an allocation whose ranks an old master started is taken back by this master and then
continued; a checkpoint that old ranks wrote is verified and resumed; a dsat search whose old driver was killed is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "goldens" / "model"
DEADLINE_S = 240.0
PROOFS = ("allocation", "checkpoint", "search")


class Code:
    """One commit's code, in processes of their own.

    Args:
        name: for messages.
        tree: the working tree.
        scratch: where whatever it starts keeps its files.
    """

    def __init__(self, name: str, tree: Path, scratch: Path) -> None:
        self.name = name
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DSTRIAL_", "DET_"))}
        self.env = {
            **kept,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "DSTRIAL_STATE_DIR": str(scratch / "state"),
            "XDG_CONFIG_HOME": str(scratch / "config"),
        }
        place = self.run("-c", "import dstrial; print(dstrial.__file__)").strip()
        expect(Path(place).parents[1] == tree, f"{name} code is that of {tree}", place)

    def run(self, *words: str, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """Run Python to its end and return what it printed."""
        done = subprocess.run(
            [sys.executable, *words],
            env={**self.env, **(more or {})},
            cwd=cwd or Path(self.env["DSTRIAL_STATE_DIR"]).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {' '.join(words)} ended with {done.returncode}\n{done.stdout}")
        return done.stdout


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def expect(is_so: bool, what: str, got: object = "") -> None:
    """Print what holds; end this program where it does not."""
    if not is_so:
        raise SystemExit(f"NOT SO: {what}: {got}")
    say(f"  ok: {what}")


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """Return the first true value."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not (value := found()):
        if time.monotonic() > give_up_at_s:
            raise SystemExit(f"NOT SO: waited in vain for {what}")
        time.sleep(0.2)
    return value


def lives(pid: int | str) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def experiment(num_batches: int, **more: Any) -> dict[str, Any]:
    """Return an experiment of two ranks."""
    deepspeed = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return {
        "name": "taken back",
        "entrypoint": "python3 -m dstrial.launch --trial golden_trials:DataParallelTrial",
        "hyperparameters": {"deepspeed_config": deepspeed},
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": num_batches}},
        "scheduling_unit": 1,
        "min_checkpoint_period": {"batches": 2},
        "max_restarts": 0,
        **more,
    }


def prove_allocation(old: Code, new: Code, scratch: Path) -> None:
    """Have this master take back ranks of an old one, and continue their experiment."""
    from determined.experimental import Determined

    state = scratch / "state"
    go_on = scratch / "go on"
    variables = ["HOLD_AT=2", f"HOLD_UNTIL={go_on}"]
    config = experiment(4, environment={"environment_variables": variables})

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((state / "master.json").read_text())
        return found

    def user() -> Determined:
        password = json.loads((state / "credentials.json").read_text()).get("determined", "")
        return Determined(f"http://localhost:{record()['port']}", "determined", password)

    def steps(trial: Any, group: str) -> list[int]:
        return [row.steps_completed for row in trial.iter_metrics(group)]

    def supervisors() -> dict[str, Any]:
        return {
            path.parent.name: json.loads(path.read_text())
            for path in state.glob("allocations/*/supervisor.json")
        }

    old.run("-m", "dstrial.cli", "up", "--slots", "2", "--port", "0")
    try:
        number = user().create_experiment(config, MODEL).id
        (trial,) = wait_for(
            lambda: list(user().get_experiment(number).list_trials()), "the old master's trial"
        )
        wait_for(lambda: steps(trial, "training") == [1, 2], "two reported batches")
        before, old_pid = supervisors(), record()["pid"]
        os.kill(old_pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{old_pid}").exists(), "the old master's death")
        new.run("-m", "dstrial.cli", "up", "--slots", "2", "--port", str(record()["port"]))
        expect(record()["pid"] != old_pid, "this code's master serves the old one's state directory")
        expect(
            bool(before) and supervisors() == before, "the old supervisor lives on under it", supervisors()
        )
        go_on.touch()
        ended = user().get_experiment(number)
        wait_for(lambda: not ended.reload() and ended.state.name in ("COMPLETED", "ERROR"), "its end")
        expect(ended.state.name == "COMPLETED", "the old ranks completed under this master", ended.state)
        trial = user().get_trial(trial.id)
        expect(
            steps(trial, "training") == [1, 2, 3, 4],
            "every batch was reported once",
            steps(trial, "training"),
        )
        rows = user()._session.get(f"api/v1/trials/{trial.id}").json()["trial"]
        expect(rows["restarts"] == 0, "the trial was never started again", rows["restarts"])
        num_checkpoints = len(trial.list_checkpoints())
        expect(num_checkpoints >= 1, "its checkpoints are registered", num_checkpoints)
        override = yaml.safe_dump({"searcher": {"max_length": {"batches": 6}}})
        user()._session.post("api/v1/experiments/continue", json={"id": number, "overrideConfig": override})
        wait_for(
            lambda: not ended.reload() and ended.state.name in ("COMPLETED", "ERROR"), "the end of the rest"
        )
        log = "".join(trial.iter_logs())
        expect(ended.state.name == "COMPLETED", "new ranks continued from the old checkpoint", log)
        expect(
            steps(trial, "training") == [1, 2, 3, 4, 5, 6],
            "and trained what was left only",
            steps(trial, "training"),
        )
    finally:
        left = [one["pid"] for one in supervisors().values()]
        with contextlib.suppress(SystemExit):  # where no master was left to end
            new.run("-m", "dstrial.cli", "down", "--now")
        for pid in filter(lives, left):
            os.kill(int(pid), signal.SIGUSR1)  # a supervisor kills what it has started


def prove_checkpoint(old: Code, new: Code, scratch: Path) -> None:
    """Resume a run, without a master, from what old ranks have saved."""

    def train(code: Code, num_batches: int, **more: str) -> str:
        path = scratch / f"{code.name}.yaml"
        path.write_text(yaml.safe_dump(experiment(num_batches)))
        words = ["-m", "dstrial.launch", "--slots", "2", "--config", str(path), "--context-dir", str(MODEL)]
        trial = ["--trial", "golden_trials:DataParallelTrial"]
        return code.run(*words, *trial, more={"DSTRIAL_RUNS_DIR": str(scratch / "runs"), **more})

    train(old, 3)
    (run,) = {path.parent for path in (scratch / "runs").rglob("run.json")}
    verified = new.run("-m", "dstrial.cli", "checkpoint", "verify", str(run))
    expect("ok" in verified or "whole" in verified, "this code verifies the old checkpoint", verified)
    text = train(new, 5, DSTRIAL_RUN_DIR=str(run), DSTRIAL_RESUME="latest")
    expect("resumed from checkpoint" in text, "this code resumed the old run", text)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [row["steps_completed"] for row in rows if row["group"] == "training"]
    expect(found == [1, 2, 3, 4, 5], "and trained what was left only", found)


def prove_search(old: Code, new: Code, scratch: Path) -> None:
    """Finish a search of dsat whose driver, of the old code, was killed after its first trial; its worker lives on."""
    output = scratch / "search"
    words = ["-m", "dstrial.dsat", "predict", str(ROOT / "experiment_configs" / "dsat_trial.yaml")]
    words += [str(ROOT / "model_defs" / "dsat_trial"), "--local", "--output", str(output), "-m", "throughput"]
    words += ["--max-trials", "3", "--measure-seconds", "0.2", "-z", "0", "1"]

    def events(kind: str) -> list[dict[str, Any]]:
        path = output / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    log = scratch / "search.log"
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, *words],
            env=old.env,
            cwd=scratch,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_for(lambda: events("result") or driver.poll() is not None, "the old driver's first result")
    finally:
        driver.kill()
        driver.wait()
    workers = {path: path.read_text() for path in output.glob("workers/*/launcher.pid")}
    before, known = events("result"), json.loads((output / "search.json").read_text())
    expect(
        len(before) >= 1 and not events("finished"),
        "the old driver was killed in its search",
        log.read_text(),
    )
    expect(bool(workers) and all(map(lives, workers.values())), "its worker lives on", workers)
    try:
        printed = new.run(*words)
    finally:
        for pid in filter(lives, workers.values()):
            os.killpg(int(pid), signal.SIGKILL)
    adopted = {path: path.read_text() for path in output.glob("workers/*/launcher.pid")}
    expect(adopted == workers, "this code's driver went on with the old worker", adopted)
    after = events("result")
    expect(after[: len(before)] == before, "this code's driver kept what was measured")
    numbers = [event["trial_id"] for event in after]
    expect(
        len(set(numbers)) == len(numbers) and len(events("finished")) == 1, "and finished the search", printed
    )
    expect(len(events("inputs")) == 1, "without describing the model again")
    expect(json.loads((output / "search.json").read_text()) == known, "under the same fingerprint and id")
    expect((output / "best_ds_config.json").exists(), "with a best configuration")


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Give a working tree of a commit while the block lasts."""
    with tempfile.TemporaryDirectory(prefix="dstrial-old-") as scratch:
        tree = Path(scratch).resolve() / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    """Prove everything, or what was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT", help="whose code starts the work")
    parser.add_argument(
        "--only", choices=PROOFS, nargs="+", default=PROOFS, help="what to prove (everything)"
    )
    args = parser.parse_args()
    proofs = {"allocation": prove_allocation, "checkpoint": prove_checkpoint, "search": prove_search}
    with tree_of(args.commit) as tree:
        for name in args.only:
            with tempfile.TemporaryDirectory(prefix="dstrial-back-") as place:
                scratch = Path(place).resolve()
                began_s = time.monotonic()
                say(f"{name}: begun by {args.commit}, finished by this code")
                os.environ["XDG_CONFIG_HOME"] = str(scratch / "config")
                proofs[name](Code("old", tree, scratch), Code("new", ROOT, scratch), scratch)
                say(f"{name}: proved in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
