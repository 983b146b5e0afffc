"""Asynchronous reports: none is lost or duplicated, however a run ends."""

import dataclasses
import shutil
import time

import numpy as np
import pytest
from determined import pytorch
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


BATCHES = 50


def run_of(tmp_path, run=None, trial="DataParallelTrial", env=None, hparams=None):
    """Train on two ranks: a report every 2 batches, a checkpoint every 5."""
    given = {"deepspeed_config": deepspeed_config(1), "num_records": 70, **(hparams or {})}
    config = experiment(given, BATCHES, report=2, validate=1000, checkpoint=5)
    return train(tmp_path, trial, config, ranks=2, run=run, env=env, module="slow_sinks")


def require_each_once(run):
    """Assert that reports are in order, without duplicates."""
    for group in ("training", "validation"):
        steps = [row["steps_completed"] for row in run.rows(group)]
        assert steps == sorted(set(steps))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("whole"))
    assert run.returncode == 0, run.output
    assert list(run.reports("training")) == list(range(2, BATCHES + 1, 2))
    require_each_once(run)
    return run


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How an attempt ends: exit code, part of its output, newest complete checkpoint."""

    returncode: int
    says: str
    newest: int
    env: dict = dataclasses.field(default_factory=dict)
    hparams: dict = dataclasses.field(default_factory=dict)


# Each attempt resumes from the newest checkpoint of the previous attempt.
ATTEMPTS = (
    Attempt(137, "rank 0 failed first", 5, {"KILLED_AT_REPORT": "8"}),
    Attempt(1, "ValueError: the sink refuses batch 12", 10, {"SINK_RAISES_AT": "12"}),
    Attempt(1, "IsADirectoryError", 15, {"RECORD_BREAKS_AT": "14"}),
    # Fails in the batch after a report, while the ranks exchange the report's values.
    Attempt(1, "rank 0 failed first", 20, hparams={"raise_at": "0:24"}),
    Attempt(1, "rank 1 failed first", 25, hparams={"raise_at": "1:28"}),
    Attempt(137, "rank 1 failed first", 30, {"KILL_AT": "1:32"}),
    Attempt(137, "rank 0 failed first", 35, {"KILL_AT": "0:38"}),
    Attempt(0, "stopping after batch", 42, {"SINK_SLEEPS_S": "0.3"}, {"request_stop_at": "1:41"}),
)


def test_interrupted_attempts_report_as_whole_run(tmp_path, whole):
    """A complete checkpoint implies that all earlier reports are written."""
    run, log = None, tmp_path / "log"
    for number, attempt in enumerate(ATTEMPTS):
        began_s = time.monotonic()
        env = {"KILL_MARKER": str(tmp_path / str(number)), "SINK_LOG": str(log), **attempt.env}
        before = max(run.checkpoints()) if run else 0
        run = run_of(tmp_path, run=run, trial="Talking", env=env, hparams=attempt.hparams)
        assert run.returncode == attempt.returncode, run.output
        assert attempt.says in run.output
        newest = max(run.checkpoints())
        assert attempt.newest <= newest <= attempt.newest + (2 if attempt.returncode == 0 else 0)
        assert time.monotonic() - began_s < 80  # the deadline of the ranks is 100 s
        if "SINK_RAISES_AT" in env:
            assert log.read_text().splitlines() == [f"training {batch}" for batch in range(before + 1, 13, 2)]
        if "RECORD_BREAKS_AT" in env:
            record = run.directory.metrics_path
            record.rmdir()
            shutil.move(record.with_name("kept.jsonl"), record)
        written = list(run.reports("training"))
        assert written == list(range(2, written[-1] + 1, 2)), "no gap"
        assert written[-1] >= newest // 2 * 2
        if attempt.returncode == 0:
            assert written[-1] == newest // 2 * 2
    run = run_of(tmp_path, run=run, trial="Talking")

    assert run.returncode == 0, run.output
    assert run.reports("training") == whole.reports("training")
    assert run.reports("validation") == whole.reports("validation")
    require_each_once(run)


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds
        self.seen = []

    def open(self, context):
        self.first_s = None

    def report(self, group, batches_trained, metrics):
        time.sleep(self.seconds)
        self.seen.append((group, batches_trained))

    def close(self):
        self.seen.append("closed")


class LastValues(pytorch.MetricReducer):
    """Returns its internal list, which it then clears and reuses."""

    def __init__(self):
        self.values = []

    def reset(self):
        self.values.clear()

    def update(self, value):
        self.values.append(value)

    def per_slot_reduce(self):
        return self.values

    def cross_slot_reduce(self, per_slot_metrics):
        return per_slot_metrics[0]


def test_report_is_unaffected_by_reused_reducer_list():
    def __init__(self, context):  # noqa: N807
        super(trial_type, self).__init__(context)
        self.reducer = context.wrap_reducer(LastValues(), "last", for_validation=False)

    def train_batch(self, iterator, epoch_idx, batch_idx):
        self.reducer.update(batch_idx)
        metrics = super(trial_type, self).train_batch(iterator, epoch_idx, batch_idx)
        return {"loss": metrics["loss"], "array": np.array([batch_idx, batch_idx])}

    trial_type = trial_class(__init__=__init__, train_batch=train_batch)
    outcome = fit(trial=trial_type, metric_sinks=[Slow(0.1)], max_length=Batch(6), reporting_period=Batch(2))
    lasts = {steps: sorted(set(row["last"])) for steps, row in outcome.rows("training").items()}
    assert lasts == {2: [0, 1], 4: [2, 3], 6: [4, 5]}
