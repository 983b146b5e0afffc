"""Reports are written behind training: none is lost or doubled, whatever ends the run, and failures end all ranks."""

import itertools
import json
import shutil
import time

import numpy as np
import pytest
from determined import pytorch
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def run_of(tmp_path, run=None, trial="DataParallelTrial", batches=20, env=None, **periods):
    """Train on two ranks with the sink of ``slow_sinks``, and a report every second batch."""
    hyperparameters = {"deepspeed_config": deepspeed_config(1), "num_records": 70}
    hyperparameters.update(periods.pop("hyperparameters", {}))
    config = experiment(
        hyperparameters, batches, **{"report": 2, "validate": 1000, "checkpoint": 5, **periods}
    )
    return train(tmp_path, trial, config, ranks=2, run=run, env=env, module="slow_sinks")


def require_each_once(run):
    """No report may be there twice, nor out of order."""
    rows = [(row["steps_completed"], row["group"]) for row in run.rows("training") + run.rows("validation")]
    assert len(rows) == len(set(rows))
    for group in ("training", "validation"):
        steps = [row["steps_completed"] for row in run.rows(group)]
        assert steps == sorted(steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("whole"))
    assert run.returncode == 0, run.output
    assert list(run.reports("training")) == list(range(2, 21, 2))
    require_each_once(run)
    return run


def test_a_rank_killed_between_a_report_and_its_writing_leaves_no_gap(tmp_path, whole):
    killed = run_of(tmp_path, env={"KILLED_AT_REPORT": "8"})
    assert killed.returncode == 137, killed.output
    newest = max(killed.checkpoints())
    written = list(killed.reports("training"))
    assert newest == 5, "a checkpoint is registered only behind the reports before it"
    assert written == [2, 4, 6, 8]
    resumed = run_of(tmp_path, run=killed)
    assert resumed.returncode == 0, resumed.output
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


def test_what_a_sink_raises_ends_all_ranks(tmp_path, whole):
    failed = run_of(tmp_path, env={"SINK_RAISES_AT": "6", "SINK_LOG": str(tmp_path / "log")})
    assert failed.returncode == 1, failed.output
    assert "ValueError: the sink refuses batch 6" in failed.output
    assert "rank 0 failed first" in failed.output
    assert failed.checkpoints() == [5], "no checkpoint is registered behind a report that is missing"
    assert (tmp_path / "log").read_text().splitlines() == ["training 2", "training 4", "training 6"]
    resumed = run_of(tmp_path, run=failed)
    assert resumed.returncode == 0, resumed.output
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


def test_reports_that_the_disk_has_refused_come_again_after_a_resume(tmp_path, whole):
    failed = run_of(tmp_path, checkpoint=3, env={"RECORD_BREAKS_AT": "4"})
    assert failed.returncode == 1, failed.output
    assert "IsADirectoryError" in failed.output
    assert failed.checkpoints() == [3]
    record = failed.directory.metrics_path
    record.rmdir()
    shutil.move(record.with_name("kept.jsonl"), record)
    assert list(failed.reports("training")) == [2, 4]
    resumed = run_of(tmp_path, run=failed)
    assert resumed.returncode == 0, resumed.output
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


def test_ranks_of_different_speed_and_a_slow_sink_change_no_report(tmp_path, whole):
    env = {"SINK_SLEEPS_S": "0.05", "SINK_LOG": str(tmp_path / "log")}
    run = run_of(tmp_path, trial="SlowOnRank1", env=env)
    assert run.returncode == 0, run.output
    assert run.reports("training") == whole.reports("training")
    assert run.reports("validation") == whole.reports("validation")
    require_each_once(run)
    seen = (tmp_path / "log").read_text().splitlines()
    assert seen == [*(f"training {batch}" for batch in range(2, 21, 2)), "validation 20"]


def test_a_rank_that_stops_while_a_report_is_written_loses_none(tmp_path, whole):
    stopping = {"request_stop_at": "1:6"}
    stopped = run_of(tmp_path, hyperparameters=stopping, checkpoint=1000, env={"SINK_SLEEPS_S": "0.3"})
    assert stopped.returncode == 0, stopped.output
    (at,) = stopped.checkpoints()
    assert 7 <= at <= 9
    assert list(stopped.reports("training")) == list(range(2, at + 1, 2))
    resumed = run_of(tmp_path, run=stopped)
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


def test_what_user_code_exchanges_between_is_not_mixed_up(tmp_path, whole):
    run = run_of(tmp_path, trial="Talking")
    assert run.returncode == 0, run.output
    assert run.reports("training") == whole.reports("training")


def test_more_metrics_than_a_message_holds_are_reported_too(tmp_path, whole):
    run = run_of(tmp_path, trial="ManyMetrics")
    assert run.returncode == 0, run.output
    losses = {steps: row["loss"] for steps, row in run.reports("training").items()}
    assert losses == {steps: row["loss"] for steps, row in whole.reports("training").items()}
    assert run.reports("training")[20]["metric_199"] == 18.5 + 199


@pytest.mark.exhaustive("[0]")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_an_exchange_is_under_way_ends_all_and_leaves_no_gap(tmp_path, whole, rank):
    began_s = time.monotonic()
    hyperparameters = {"raise_at": f"{rank}:14"}  # the batch after the report of batch 14
    failed = run_of(tmp_path, trial="Talking", hyperparameters=hyperparameters)
    assert failed.returncode == 1, failed.output
    assert f"rank {rank} failed first" in failed.output
    assert "LookupError: this batch is bad" in failed.output
    assert time.monotonic() - began_s < 60  # the deadline of the ranks is 100 s
    assert list(failed.reports("training"))[:6] == list(range(2, 13, 2)), (
        "only the report under way may be lost"
    )
    resumed = run_of(tmp_path, run=failed)
    assert resumed.returncode == 0, resumed.output
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


@pytest.mark.exhaustive("[1]")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_an_exchange_is_under_way_leaves_no_gap(tmp_path, whole, rank):
    env = {"KILL_AT": f"{rank}:14", "KILL_MARKER": str(tmp_path / "killed")}
    killed = run_of(tmp_path, env=env)
    assert killed.returncode == 137, killed.output
    written = list(killed.reports("training"))
    assert written == list(range(2, len(written) * 2 + 1, 2)), "no gap"
    if rank == 1:
        assert len(written) >= 6, "all before the one under way: who writes was not killed"
    resumed = run_of(tmp_path, run=killed)
    assert resumed.returncode == 0, resumed.output
    assert resumed.reports("training") == whole.reports("training")
    require_each_once(resumed)


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


def test_the_loop_does_not_wait_for_a_sink():
    sink, began_s = Slow(0.6), []

    def train_batch(self, iterator, epoch_idx, batch_idx):
        began_s.append(time.monotonic())
        return super(trial_type, self).train_batch(iterator, epoch_idx, batch_idx)

    trial_type = trial_class(train_batch=train_batch)
    fit(trial=trial_type, metric_sinks=[sink], max_length=Batch(10), reporting_period=Batch(2))
    gaps_s = [after - before for before, after in itertools.pairwise(began_s)]
    assert sum(gap_s > 0.5 for gap_s in gaps_s) <= 1, "only the first report is waited for"
    assert sink.seen == [*(("training", batch) for batch in range(2, 11, 2)), ("validation", 10), "closed"]


def test_reports_before_an_error_are_written():
    sink = Slow(0.2)

    def train_batch(self, iterator, epoch_idx, batch_idx):
        if batch_idx == 9:
            raise RuntimeError("the tenth batch is bad")
        return super(trial_type, self).train_batch(iterator, epoch_idx, batch_idx)

    trial_type = trial_class(train_batch=train_batch)
    with pytest.raises(RuntimeError, match="the tenth batch is bad"):
        fit(trial=trial_type, metric_sinks=[sink], max_length=Batch(20), reporting_period=Batch(2))
    assert sink.seen == [*(("training", batch) for batch in range(2, 9, 2)), "closed"]


class LastValues(pytorch.MetricReducer):
    """Hands out the one list that it goes on writing to."""

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


def test_a_report_is_what_it_was_although_the_reducer_uses_its_list_again():
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


def test_progress_is_told_to_the_end_after_all_reports():
    outcome = fit(max_length=Batch(6), reporting_period=Batch(2))
    progress = json.loads((outcome.directory.path / "progress.json").read_text())
    assert (progress["progress"], progress["batches_trained"]) == (1.0, 6)
