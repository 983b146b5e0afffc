"""Trials whose ranks disagree, or which wrap two engines."""

import deepspeed
import torch
from small_trials import ByHandTrial, DataParallelTrial, Records
from torch.utils import data


class OtherMetricOnRank1(DataParallelTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {"other": metrics["loss"]} if self.context.distributed.get_rank() else metrics


class NoLength(data.IterableDataset):
    def __init__(self, count):
        self.records = Records(count, 1)

    def __iter__(self):
        return (self.records[idx] for idx in range(len(self.records)))


class OwnLoader(DataParallelTrial):
    def __init__(self, context):
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()


class ShorterOnRank1(OwnLoader):
    def build_training_data_loader(self):
        return data.DataLoader(Records(64 - 16 * self.context.distributed.get_rank(), 1), batch_size=4)


class EndsEarlyOnRank1(OwnLoader):
    def build_training_data_loader(self):
        count = 400 if self.context.distributed.get_rank() == 0 else 24
        return iter(data.DataLoader(NoLength(count), batch_size=4))


class NoValidationOnRank1(DataParallelTrial):
    def build_validation_data_loader(self):
        return None if self.context.distributed.get_rank() else super().build_validation_data_loader()


class SecondEngineOfStage3(DataParallelTrial):
    def __init__(self, context):
        super().__init__(context)
        config = self.ds_config()
        config["zero_optimization"] = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        }
        model = torch.nn.Linear(8, 4)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.second = context.wrap_model_engine(engine)

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = next(dataloader_iter)
        self.second(features)
        return {"validation_loss": (targets**2).mean()}


class TwoEnginesByHand(SecondEngineOfStage3, ByHandTrial):
    """Wraps two engines and trains all micro batches of a batch in one call."""
