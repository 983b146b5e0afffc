"""The training script of the chaos program: a launcher and two ranks.

Each rank computes a part of every step, and prints numbered lines.
"""

import http.client
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

NUM_STEPS = 24
NUM_RANKS = 2
VALIDATION_PERIOD = 3
CHECKPOINT_PERIOD = 4
STEP_S = 0.05


def part_of_step(rank: int, state: float, lr: float) -> float:
    """Return one rank's part of a step, which subtracts both ranks' parts."""
    return lr * 2.0 * state if rank == 0 else -lr * 0.1 * state * state


def undisturbed(lr: float) -> list[float]:
    """Return the loss after every step of training without failures."""
    losses, state = [], 1.0
    for _ in range(NUM_STEPS):
        state -= part_of_step(0, state, lr) + part_of_step(1, state, lr)
        losses.append(state)
    return losses


def launch() -> int:
    ranks = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank)})
        for rank in range(NUM_RANKS)
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            # Print no traceback: two equal ones before the first batch would fail the trial for good.
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return 3 if any(rank.wait() for rank in ranks) else 0


def printer(run_id: int, rank: int):
    """Return a function that prints a line that is unique among all ranks and runs."""
    numbers = itertools.count(1)
    stream = sys.stdout if rank == 0 else sys.stderr

    def say(text: str) -> None:
        stream.write(f"[rank={rank}] run {run_id} rank {rank} line {next(numbers)}: {text}\n")
        stream.flush()

    return say


class Master:
    """Requests to the master, retried until it answers."""

    def __init__(self, info) -> None:
        self._info = info
        self._run_id = info.trial._trial_run_id

    def wait_until_stored(self, done: int, validated: int) -> None:
        """Wait until the last reports are stored; the client sends them in a thread."""
        while True:
            trial = self._get(f"trials/{self._info.trial.trial_id}")["trial"]
            of_runs = trial["summaryMetrics"].get("avg_metrics", {}).get("run", {})
            trained = trial["totalBatchesProcessed"] if of_runs.get("last") == self._run_id else 0
            stored = (trial["latestValidation"] or {}).get("totalBatches", 0)
            if trained >= done and stored >= validated:
                return
            time.sleep(0.005)

    def _get(self, path: str) -> dict:
        request = urllib.request.Request(
            f"{self._info.master_url}/api/v1/{path}",
            headers={"Authorization": f"Bearer {self._info.session_token}"},
        )
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    # The master has ended this run.
                    sys.exit(4)
            except (OSError, ValueError, http.client.HTTPException):
                pass
            time.sleep(0.05)


def train(rank: int) -> None:
    import determined as det

    info = det.get_cluster_info()
    master, lr = Master(info), info.trial.hparams["lr"]
    say = printer(info.trial._trial_run_id, rank)
    distributed = det.core.DistributedContext(
        rank=rank, size=NUM_RANKS, local_rank=rank, local_size=NUM_RANKS, cross_rank=0, cross_size=1
    )
    # The other modes import torch for its TensorBoard writer.
    mode = det.core.TensorboardMode.MANUAL
    with det.core.init(distributed=distributed, tensorboard_mode=mode) as core:
        done, state = 0, 1.0
        if info.latest_checkpoint is not None:
            with core.checkpoint.restore_path(info.latest_checkpoint) as path:
                done, state = json.loads((path / "state.json").read_text())
        say(f"starts behind batch {done}")
        is_asked = False
        while done < NUM_STEPS and not is_asked:
            time.sleep(STEP_S)
            state -= sum(distributed.allgather(part_of_step(rank, state, lr)))
            done += 1
            say(f"batch {done}")
            if rank == 0:
                core.train.report_training_metrics(done, {"loss": state, "run": info.trial._trial_run_id})
                if done % VALIDATION_PERIOD == 0:
                    core.train.report_validation_metrics(done, {"validation_loss": state, "batches": done})
            is_asked = core.preempt.should_preempt()
            if rank == 0 and (is_asked or done % CHECKPOINT_PERIOD == 0):
                # Store the reports before the checkpoint: a run that resumes from it does not repeat them.
                master.wait_until_stored(done, done // VALIDATION_PERIOD * VALIDATION_PERIOD)
                with core.checkpoint.store_path({"steps_completed": done}) as (path, _):
                    (path / "state.json").write_text(json.dumps([done, state]))
        say(f"ends behind batch {done}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        sys.exit(launch())
