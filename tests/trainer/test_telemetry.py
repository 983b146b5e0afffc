"""Telemetry of in-process runs: times, memory, FLOPS, tokens."""

import json

import pytest
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config

from dstrial import Batch

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]

TIMES = {"batch_ms", "data_wait_ms", "forward_ms", "backward_ms", "step_ms", "other_ms"}


def fitted():
    hparams = {"deepspeed_config": deepspeed_config(0), "dropout": 0.2}
    return fit(hparams=hparams, max_length=Batch(9), reporting_period=Batch(3))


def test_telemetry_report_has_times_and_memory():
    outcome = fitted()
    rows = outcome.rows("telemetry")
    first, last = rows[3], rows[9]

    assert {*TIMES, "records_per_second", "process_peak_memory_bytes", "learning_rate"} <= last.keys()
    assert last["timed_by"] == "host clock"
    assert 0 < sum(last[name] for name in TIMES - {"batch_ms"}) == pytest.approx(last["batch_ms"])
    assert last["ranks"]["batch_ms"] == [last["batch_ms"]]
    assert "tokens_per_second" not in last
    assert not [name for name in last if name.startswith("device")], "on CPU there is no device memory"
    # 8 records, layers 8 x 16 and 16 x 4: 3 matrix products per layer, but no gradient of the features.
    flops = 8 * 2 * (3 * 16 * 4 + 2 * 8 * 16)
    for row in (first, last):
        assert row["model_tflops_per_device"] == pytest.approx(flops / row["batch_ms"] / 1e9, rel=1e-3)
    totals = json.loads(outcome.directory.telemetry_path.read_text())
    assert totals["num_batches"] == 8, "the first batch does not count"
    assert totals["model_tflops_per_device"] > 0
    assert "mfu" not in totals, "the CPU has no data sheet"


def test_tokens_are_counted_from_input_ids():
    class Named:
        def __init__(self, records):
            self.records = records

        def __len__(self):
            return len(self.records)

        def __getitem__(self, idx):
            features, targets = self.records[idx]
            return {"input_ids": features, "targets": targets}

    def build_training_data_loader(self):
        loader = super(kind, self).build_training_data_loader()
        loader.dataset = Named(loader.dataset)
        return loader

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return super(kind, self).train_batch(
            ((batch["input_ids"], batch["targets"]) for batch in dataloader_iter), epoch_idx, batch_idx
        )

    kind = trial_class(build_training_data_loader=build_training_data_loader, train_batch=train_batch)
    outcome = fit(kind, max_length=Batch(6), reporting_period=Batch(3))

    for row in outcome.rows("telemetry").values():
        assert row["tokens_per_second"] == pytest.approx(8 * row["records_per_second"])


@pytest.mark.parametrize(
    ("answer", "tokens_per_record"), [(lambda batch: 5 * len(batch[0]), 5), (lambda _: None, None)]
)
def test_get_num_tokens_overrides_token_count(answer, tokens_per_record):
    kind = trial_class(get_num_tokens=lambda _self, batch: answer(batch))
    outcome = fit(kind, max_length=Batch(6), reporting_period=Batch(3))

    for row in outcome.rows("telemetry").values():
        if tokens_per_record is None:
            assert "tokens_per_second" not in row
        else:
            assert row["tokens_per_second"] == pytest.approx(tokens_per_record * row["records_per_second"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [(lambda batch: batch["text"], "TypeError"), (lambda _: 2.5, "it returned 2.5; expected an integer")],
)
def test_wrong_token_count_warns_once_and_continues(answer, words, caplog):
    kind = trial_class(get_num_tokens=lambda _self, batch: answer(batch))
    outcome = fit(kind, max_length=Batch(6), reporting_period=Batch(3))

    assert outcome.result.is_complete
    assert not [row for row in outcome.rows("telemetry").values() if "tokens_per_second" in row]
    (warning,) = [record.message for record in caplog.records if "get_num_tokens" in record.message]
    assert words in warning


def test_failed_telemetry_write_does_not_end_training(caplog):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 0:
            report = self.context._core.train.report_metrics

            def refuse(group, steps_completed, metrics):
                if steps_completed == 4:
                    raise OSError(28, "No space left on device")
                report(group, steps_completed, metrics)

            self.context._core.train.report_metrics = refuse
        return super(kind, self).train_batch(dataloader_iter, epoch_idx, batch_idx)

    kind = trial_class(train_batch=train_batch)
    outcome = fit(kind, max_length=Batch(8), reporting_period=Batch(2))

    assert outcome.result.is_complete
    assert sorted(outcome.rows("training")) == [2, 4, 6, 8]
    assert sorted(outcome.rows("telemetry")) == [2, 6, 8]
    warnings = [
        record.message for record in caplog.records if "telemetry could not be written" in record.message
    ]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]


def test_tensorboard_has_telemetry_tags():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = fitted()
    (events,) = outcome.directory.path.rglob("*tfevents*")
    found = EventAccumulator(str(events))
    found.Reload()
    tags = set(found.Tags()["scalars"])

    assert {f"Telemetry/{name}" for name in TIMES} <= tags
    assert {tag.partition("/")[0] for tag in tags} == {"Determined", "Telemetry"}
