"""Batch samplers, custom loaders, hanging workers, and incomplete last batches."""

import threading

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config, experiment, train
from torch import nn
from torch.utils import data

from dstrial import Batch, DataLoader
from dstrial.errors import DataError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def mean_target(records):
    """Return the mean squared target, which is the loss of a model with output 0."""
    return float((records.targets**2).mean())


def zero_answer(self, items, batch_idx):
    _, targets = next(items)
    return {"validation_loss": (targets**2).mean()}


def test_custom_batch_sampler_visits_each_record_once():
    import small_trials

    records = small_trials.Records(24, 1)
    seen = []

    def build_training_data_loader(self):
        sampler = data.BatchSampler(data.RandomSampler(records), 3, drop_last=False)
        return DataLoader(records, batch_sampler=sampler)

    def build_validation_data_loader(self):
        sampler = data.BatchSampler(data.SequentialSampler(records), 5, drop_last=False)
        return DataLoader(records, batch_sampler=sampler)

    def train_batch(self, items, epoch_idx, batch_idx):
        features, targets = next(items)
        seen.append(features)
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

    trial = trial_class(
        build_training_data_loader=build_training_data_loader,
        build_validation_data_loader=build_validation_data_loader,
        train_batch=train_batch,
        evaluate_batch=zero_answer,
    )
    done = fit(trial, max_length=Batch(4))
    assert sorted(map(tuple, torch.cat(seen).tolist())) == sorted(map(tuple, records.features.tolist()))
    assert done.rows("validation")[4]["epochs"] == 1
    assert done.rows("validation")[4]["validation_loss"] == pytest.approx(mean_target(records), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("own", [False, True], ids=["planned", "loader of the user's own"])
def test_pipeline_validates_every_record_with_any_loader(own, accumulation):
    import small_trials

    records = small_trials.Records(27, 2)

    def loss_fn(outputs, targets):
        return nn.functional.mse_loss(outputs * 0, targets)

    def build_engine(self):
        module = PipelineModule([LayerSpec(nn.Linear, 8, 4)], num_stages=1, loss_fn=loss_fn)
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=self.ds_config()
        )
        return engine

    def __init__(self, context):  # noqa: N807
        small_trials.Common.__init__(self, context)
        if own:
            context.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self):
        return (data.DataLoader if own else DataLoader)(records, batch_size=4)

    members = {
        "__init__": __init__,
        "build_engine": build_engine,
        "build_validation_data_loader": build_validation_data_loader,
    }
    done = fit(
        type("OneStage", (small_trials.PipelineTrial,), members),
        max_length=Batch(3),
        validation_period=Batch(2),
        hparams={"deepspeed_config": deepspeed_config(gradient_accumulation_steps=accumulation)},
    )
    assert list(done.rows("validation")) == [2, 3]
    for row in done.rows("validation").values():
        assert row["validation_loss"] == pytest.approx(mean_target(records), rel=1e-5)


class Stuck(data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, record):
        threading.Event().wait()


def test_hanging_loader_worker_error_names_rank_and_batch(monkeypatch):
    monkeypatch.setenv("DSTRIAL_TIMEOUT_S", "2")
    trial = trial_class(
        build_training_data_loader=lambda self: DataLoader(Stuck(), batch_size=4, num_workers=1)
    )
    with pytest.raises(DataError, match="loader worker of rank 0 has answered nothing in batch 0"):
        fit(trial)


@pytest.mark.parametrize("stage", [0, 3])
def test_fewer_validation_records_than_replicas_count_once(tmp_path, stage):
    hyperparameters = {"deepspeed_config": deepspeed_config(stage), "num_validation_records": 9}
    config = experiment(hyperparameters, batches=2)
    run = train(tmp_path, "DataParallelTrial", config, ranks=2)
    assert run.returncode == 0, run.output
    assert run.reports("validation")[2]["mean_size"] == pytest.approx((4 * 4 + 4 * 4 + 1) / 9)
