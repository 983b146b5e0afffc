"""Trials with data sets that shard their own records."""

from small_trials import DataParallelTrial, PipelineTrial
from stream_records import Shared, as_pair, hugging_face
from torch.utils import data


class OwnLoader(DataParallelTrial):
    def __init__(self, context):
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def replica(self):
        return self.context.get_data_parallel_rank(), self.context.get_data_parallel_world_size()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {"loss": metrics["loss"]}

    def micro(self):
        return self.context.get_train_micro_batch_size_per_gpu()

    def build_training_data_loader(self):
        return data.DataLoader(Shared(self.hparams["num_records"], *self.replica()), batch_size=self.micro())


class StreamOfHuggingFace(OwnLoader):
    def build_training_data_loader(self):
        stream = hugging_face(self.hparams["num_records"], *self.replica())
        return data.DataLoader(stream, batch_size=self.micro(), collate_fn=as_pair)


class SameRecordsOnAllRanks(OwnLoader):
    def replica(self):
        return 0, 1


class Pipeline(PipelineTrial, OwnLoader):
    """Stages read equal records, unless ``by_rank``; ``ragged`` cuts the last batch."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.model_engine.train_batch()}

    def replica(self):
        if self.hparams.get("by_rank"):
            return self.context.distributed.get_rank(), self.context.distributed.get_size()
        return super().replica()

    def build_training_data_loader(self):
        count = self.hparams["num_records"] - (2 if self.hparams.get("ragged") else 0)
        return data.DataLoader(Shared(count, *self.replica()), batch_size=self.micro())
