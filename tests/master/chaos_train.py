"""The trial of the chaos program: a launcher and two ranks, each of which works out a part of every step.

A rank keeps a journal: what it is about to print, what it has printed, and what the master has confirmed to it.
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
    """Return what one rank works out: the sum over both is what a step takes off the state."""
    return lr * 2.0 * state if rank == 0 else -lr * 0.1 * state * state


def undisturbed(lr: float) -> list[float]:
    """Return the loss after every step."""
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
            # Without a traceback, two of which before the first batch would end the trial for good.
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return 3 if any(rank.wait() for rank in ranks) else 0


class Journal:
    """Facts in the order in which they came to be, one JSON list per line; a SIGKILL loses none of them."""

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
        """Print a line that no other process or run prints."""
        self._num_lines += 1
        line = f"{self._name} line {self._num_lines}: {text}"
        self.note("printing", line)
        self._stream.write(f"{self._tag}{line}\n")
        self._stream.flush()
        self.note("printed", line)


class Master:
    """The trial's own questions to the master, asked until they are answered."""

    def __init__(self, info) -> None:
        self._info = info
        self._run_id = info.trial._trial_run_id

    def asks_to_stop(self) -> bool:
        """Say whether the trial is to stop by now; ``should_preempt`` learns of it from a thread, batches later."""
        path = f"allocations/{self._info.allocation_id}/signals/preemption?timeout_seconds=0"
        return bool(self._get(path)["preempt"])

    def wait_until_stored(self, done: int, *, is_validated: bool) -> None:
        """Wait for the reports of a batch: Determined's client sends them from a thread."""
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
                    # This run is over for the master.
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
    # The other modes import torch for its writer.
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
                # A checkpoint never is ahead of the reports: a run that starts from it does not repeat them.
                if is_validated or is_saved:
                    master.wait_until_stored(done, is_validated=is_validated)
                    journal.note("training", done, state)
                if is_validated:
                    journal.note("validation", done, state)
            if is_validated:
                is_asked = distributed.broadcast(master.asks_to_stop() if rank == 0 else None)
                if is_asked and rank == 0:
                    core.preempt.acknowledge_preemption_signal()
            # In this order, since every rank has to take part.
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
