"""The training script of the chaos program: a launcher and two ranks.

Each rank computes a part of every step. Its journal has each line before and after printing it, and the reports and
checkpoints that the master has confirmed.
"""

import http.client
import json
import os
import pathlib
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


class Journal:
    """A file of facts in order, one JSON list per line, that survives SIGKILL."""

    def __init__(self, directory: str, trial_id: int, run_id: int, rank: int) -> None:
        path = pathlib.Path(directory, f"{trial_id}-{run_id}-{rank}.jsonl")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._name = f"run {run_id} rank {rank}"
        self._stream = sys.stdout if rank == 0 else sys.stderr
        self._tag = f"[rank={rank}] "
        self._num_lines = 0

    def note(self, *fact: object) -> None:
        os.write(self._descriptor, (json.dumps(fact) + "\n").encode())

    def say(self, text: str) -> None:
        """Print a line that is unique among all processes and runs."""
        self._num_lines += 1
        line = f"{self._name} line {self._num_lines}: {text}"
        self.note("printing", line)
        self._stream.write(f"{self._tag}{line}\n")
        self._stream.flush()
        self.note("printed", line)


class Master:
    """Requests to the master, retried until it answers."""

    def __init__(self, info) -> None:
        self._info = info
        self._run_id = info.trial._trial_run_id

    def asks_to_stop(self) -> bool:
        """Return whether the trial must stop; ``should_preempt`` learns it batches later."""
        path = f"allocations/{self._info.allocation_id}/signals/preemption?timeout_seconds=0"
        return bool(self._get(path)["preempt"])

    def wait_until_stored(self, done: int, *, is_validated: bool) -> None:
        """Wait until a batch's reports are stored; the client sends them in a thread."""
        while True:
            trial = self._get(f"trials/{self._info.trial.trial_id}")["trial"]
            of_runs = trial["summaryMetrics"].get("avg_metrics", {}).get("run", {})
            trained = trial["totalBatchesProcessed"] if of_runs.get("last") == self._run_id else 0
            validated = (trial["latestValidation"] or {}).get("totalBatches", 0)
            if trained >= done and (not is_validated or validated >= done):
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
    journal = Journal(info.trial.hparams["journals"], info.trial.trial_id, info.trial._trial_run_id, rank)
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
        journal.say(f"starts behind batch {done}")
        is_asked = False
        while done < NUM_STEPS and not is_asked:
            time.sleep(STEP_S)
            state -= sum(distributed.allgather(part_of_step(rank, state, lr)))
            done += 1
            journal.say(f"batch {done}")
            is_validated = done % VALIDATION_PERIOD == 0
            is_saved = done % CHECKPOINT_PERIOD == 0
            if rank == 0:
                core.train.report_training_metrics(done, {"loss": state, "run": info.trial._trial_run_id})
                if is_validated:
                    core.train.report_validation_metrics(done, {"validation_loss": state, "batches": done})
                # Store the reports before the checkpoint: a run that resumes from it does not repeat them.
                if is_validated or is_saved:
                    master.wait_until_stored(done, is_validated=is_validated)
                    journal.note("training", done, state)
                if is_validated:
                    journal.note("validation", done, state)
            if is_validated:
                is_asked = distributed.broadcast(master.asks_to_stop() if rank == 0 else None)
                if is_asked and rank == 0:
                    core.preempt.acknowledge_preemption_signal()
            # Call should_preempt first: every rank must take part in it.
            is_asked = core.preempt.should_preempt() or is_asked
            if rank == 0 and (is_asked or is_saved):
                with core.checkpoint.store_path({"steps_completed": done}) as (path, uuid):
                    (path / "state.json").write_text(json.dumps([done, state]))
                journal.note("checkpoint", done, uuid)
        journal.say(f"ends behind batch {done}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        sys.exit(launch())
