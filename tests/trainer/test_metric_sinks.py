"""Custom metric sinks: reports and closing."""

import json

import pytest
from in_process_fits import fit, trial_class, values

from dstrial import Batch

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


class JsonLines:
    """A minimal metric sink: writes a JSON line per report and records its calls."""

    def __init__(self, path):
        self.path = path
        self.calls = []

    def open(self, context):
        self.calls.append("open")
        self._begins_at = context.get_initial_batch()

    def report(self, group, batches_trained, metrics):
        self.calls.append(group)
        row = {"group": group, "steps_completed": batches_trained, "metrics": dict(metrics)}
        with self.path.open("a") as file:
            file.write(json.dumps(row, default=float) + "\n")

    def close(self):
        self.calls.append("close")

    def rows(self, group):
        rows = map(json.loads, self.path.read_text().splitlines())
        return {row["steps_completed"]: row["metrics"] for row in rows if row["group"] == group}


def test_sink_receives_every_report_as_recorded(tmp_path):
    first, second = JsonLines(tmp_path / "first"), JsonLines(tmp_path / "second")
    outcome = fit(
        metric_sinks=[first, second],
        max_length=Batch(6),
        reporting_period=Batch(2),
        validation_period=Batch(4),
    )
    recorded = outcome.rows("training")
    assert first.rows("training") == recorded
    assert sorted(recorded) == [2, 4, 6]
    validations = {
        steps: {name: value for name, value in row.items() if name not in ("batches", "epochs")}
        for steps, row in outcome.rows("validation").items()
    }
    assert values(first.rows("validation")) == values(validations)
    assert sorted(validations) == [4, 6]
    expected = ["open", "training", "training", "validation", "training", "validation", "close"]
    assert first.calls == second.calls == expected
    (events,) = outcome.directory.path.rglob("*tfevents*")
    assert events.stat().st_size > 0


def test_all_sinks_are_closed_after_errors(tmp_path):
    """After an error in training, also if ``close`` of a sink raises."""

    class Failing(JsonLines):
        def close(self):
            super().close()
            raise OSError("the other end is gone")

    sinks = [JsonLines(tmp_path / "first"), Failing(tmp_path / "second")]

    def train_batch(self, iterator, epoch_idx, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("the fourth batch is bad")
        return super(trial_type, self).train_batch(iterator, epoch_idx, batch_idx)

    trial_type = trial_class(train_batch=train_batch)
    with pytest.raises(OSError, match="the other end is gone") as raised:
        fit(trial=trial_type, metric_sinks=sinks, reporting_period=Batch(2))
    assert "the fourth batch is bad" in str(raised.value.__context__)
    assert [sink.calls for sink in sinks] == [["open", "training", "close"]] * 2
