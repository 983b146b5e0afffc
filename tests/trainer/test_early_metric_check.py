"""A searcher's metric that validation does not return is found before the first batch, and training does not notice."""

import copy
import importlib
import logging

import pytest
import torch
from in_process_fits import EXP_CONF, fit, trial_class, values
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch, DataLoader, MetricReducer, PyTorchCallback
from dstrial.errors import TrialContractError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def conf(**checks):
    return {**copy.deepcopy(EXP_CONF), "data": {"dstrial": checks}}


def wrong(name):
    return getattr(importlib.import_module("wrong_trials"), name)


def test_a_wrong_metric_is_found_before_the_first_batch():
    trained = []
    base = wrong("WrongMetric")

    def train_batch(self, items, epoch_idx, batch_idx):
        trained.append(batch_idx)
        return base.train_batch(self, items, epoch_idx, batch_idx)

    with pytest.raises(TrialContractError, match=r"searcher's metric is 'validation_loss', but .*'other'"):
        fit(type("Wrong", (base,), {"train_batch": train_batch}))
    assert trained == []


def test_the_check_can_be_switched_off():
    with pytest.raises(TrialContractError, match="searcher's metric is 'validation_loss'"):
        fit(wrong("WrongMetric"), exp_conf=conf(early_metric_check=False))


@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_the_same_bit_for_bit(stage):
    results = []
    for early in (False, True):
        done = fit(
            wrong("Noting"),
            {"deepspeed_config": deepspeed_config(stage), "noise": 0.3, "dropout": 0.5},
            conf(early_metric_check=early),
            max_length=Batch(10),
            reporting_period=Batch(1),
            validation_period=Batch(4),
        )
        results.append((values(done.rows("training")), values(done.rows("validation"))))
    assert results[0] == results[1]
    assert list(results[1][1]) == [4, 8, 10]


def test_a_resumed_run_is_the_same_bit_for_bit():
    results = []
    for early in (False, True):
        arguments = {"exp_conf": conf(early_metric_check=early), "reporting_period": Batch(1)}
        first = fit(wrong("Noting"), max_length=Batch(3), **arguments)
        again = fit(
            wrong("Noting"),
            max_length=Batch(6),
            run_dir=first.directory.path,
            latest_checkpoint="latest",
            **arguments,
        )
        results.append(values(again.rows("training")))
    assert results[0] == results[1]


def test_callbacks_are_not_called_and_reducers_are_as_before():
    calls, updates = [], []

    class Callback(PyTorchCallback):
        def on_validation_start(self):
            calls.append("start")

        def on_validation_epoch_end(self, outputs):
            calls.append(len(outputs))

    class Count(MetricReducer):
        def __init__(self):
            self.reset()

        def reset(self):
            self.seen = []

        def per_slot_reduce(self):
            return len(self.seen)

        def cross_slot_reduce(self, per_slot):
            updates.append(sum(per_slot))
            return sum(per_slot)

    base = wrong("Noting")

    def __init__(self, context):  # noqa: N807
        base.__init__(self, context)
        self.count = context.wrap_reducer(Count(), "count")

    def evaluate_batch(self, items, batch_idx):
        self.count.seen.append(batch_idx)
        return base.evaluate_batch(self, items, batch_idx)

    trial = type(
        "Counted",
        (base,),
        {
            "__init__": __init__,
            "evaluate_batch": evaluate_batch,
            "build_callbacks": lambda self: {"one": Callback()},
        },
    )
    done = fit(trial, reporting_period=Batch(4))
    assert calls == ["start", 6]
    assert updates == [0, 6]
    assert list(done.rows("validation")) == [4]
    assert done.rows("training")[4]["count"] == 0


def test_a_metric_of_a_reducer_or_of_a_callback_is_not_missed():
    def on_validation_end(self, metrics):
        metrics["validation_loss"] = metrics["other"] * 2

    callback = type("Adding", (PyTorchCallback,), {"on_validation_end": on_validation_end})
    trial = type("Added", (wrong("WrongMetric"),), {"build_callbacks": lambda self: {"adding": callback()}})
    assert fit(trial).result.is_complete


def test_what_fails_only_before_training_does_not_keep_it_from_beginning(caplog):
    def train_batch(self, items, epoch_idx, batch_idx):
        self.scale = 1.0
        return base.train_batch(self, items, epoch_idx, batch_idx)

    def evaluate_batch(self, items, batch_idx):
        return {
            "validation_loss": base.evaluate_batch(self, items, batch_idx)["validation_loss"] * self.scale
        }

    base = trial_class()
    trial = type("Late", (base,), {"train_batch": train_batch, "evaluate_batch": evaluate_batch})
    with caplog.at_level(logging.INFO, "dstrial"):
        assert fit(trial).result.is_complete
    assert "AttributeError" in caplog.text
    assert "at the first validation" in caplog.text


def test_random_generators_of_a_data_set_that_training_shares_are_put_back():
    import small_records

    class Shared(small_records.Records):
        def __init__(self):
            super().__init__(64, 1)
            self.generator = torch.Generator().manual_seed(5)
            self.num_read = 0

        def __getitem__(self, idx):
            self.num_read += 1
            features, targets = super().__getitem__(idx)
            return features + torch.rand(8, generator=self.generator) + self.num_read, targets

    results = []
    for early in (False, True):
        records = Shared()
        trial = trial_class(
            build_training_data_loader=lambda self, records=records: DataLoader(records, batch_size=4),
            build_validation_data_loader=lambda self, records=records: DataLoader(
                torch.utils.data.Subset(records, range(21)), batch_size=4
            ),
        )
        done = fit(trial, exp_conf=conf(early_metric_check=early), reporting_period=Batch(1))
        results.append(values(done.rows("training")))
    assert results[0] == results[1]


# Loader workers are those of tests/trainer/test_resume.py.
@pytest.mark.exhaustive("[2-0]")
@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 2), (2, 0), (2, 2)])
def test_ranks_and_loader_workers_train_the_same_bit_for_bit(tmp_path, ranks, num_workers):
    results = []
    for early in (False, True):
        given = experiment(
            {
                "deepspeed_config": deepspeed_config(2),
                "num_workers": num_workers,
                "noise": 0.3,
                "dropout": 0.5,
            },
            batches=6,
            report=1,
            data={"dstrial": {"early_metric_check": early}},
        )
        done = train(tmp_path / str(early), "Noting", given, ranks=ranks, module="wrong_trials")
        assert done.returncode == 0, done.output
        results.append((done.reports("training"), done.reports("validation")))
    assert results[0] == results[1]


@pytest.mark.parametrize("ranks", [2])
def test_all_ranks_find_it(tmp_path, ranks):
    given = experiment({"deepspeed_config": deepspeed_config(3)}, batches=8)
    done = train(tmp_path, "WrongMetric", given, ranks=ranks, module="wrong_trials")
    assert done.returncode == 1, done.output
    assert "searcher's metric is 'validation_loss'" in done.output
    assert not done.directory.metrics_path.exists() or not done.rows("training")


@pytest.mark.parametrize("early", [None, True])
def test_pipelines_are_checked_where_it_is_asked_for(tmp_path, early):
    data = {} if early is None else {"data": {"dstrial": {"early_metric_check": early, "pipeline_stages": 2}}}
    given = experiment({"deepspeed_config": deepspeed_config(0)}, batches=8, **data)
    done = train(tmp_path, "WrongMetricOfPipeline", given, ranks=2, module="wrong_trials")
    assert done.returncode == 1, done.output
    assert "searcher's metric is 'validation_loss'" in done.output
    has_trained = done.directory.metrics_path.exists() and bool(done.rows("training"))
    assert has_trained == (early is None)


def test_a_pipeline_trains_the_same_bit_for_bit(tmp_path):
    results = []
    for early in (False, True):
        given = experiment(
            {"deepspeed_config": deepspeed_config(0)},
            batches=6,
            report=1,
            data={"dstrial": {"early_metric_check": early, "pipeline_stages": 2}},
        )
        done = train(tmp_path / str(early), "PipelineTrial", given, ranks=2)
        assert done.returncode == 0, done.output
        results.append((done.reports("training"), done.reports("validation")))
    assert results[0] == results[1]
