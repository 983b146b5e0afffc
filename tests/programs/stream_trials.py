"""Trials whose training loaders divide records by themselves: iterable, stateful and streaming ones."""

import torch
from small_records import Records
from small_trials import DataParallelTrial, PipelineTrial
from torch.utils import data


class Shared(data.IterableDataset):
    """The records of one replica, and of one loader worker, which take turns in one stream."""

    def __init__(self, count, replica=0, replicas=1):
        self.records = Records(count, 1)
        self.replica, self.replicas = replica, replicas

    def __iter__(self):
        worker = data.get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(self.replica, len(self.records), self.replicas)
        return (self.records[idx] for idx in mine[part::parts])


class Stateful(Shared):
    """Keeps its position, also in the middle of a pass."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.read = 0

    def __iter__(self):
        for idx in range(self.read, len(self.records)):
            self.read += 1
            yield self.records[idx]
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def hugging_face(count, replica=0, replicas=1, shards=4, buffer=None):
    """A streaming data set of the same records."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    records = Records(count, 1)
    columns = {"features": records.features.tolist(), "targets": records.targets.tolist()}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=shards).with_format("torch")
    if buffer:
        stream = stream.shuffle(seed=5, buffer_size=buffer)
    return split_dataset_by_node(stream, replica, replicas)


def as_pair(rows):
    """Collate rows of Hugging Face as the small trials expect them."""
    return torch.stack([row["features"] for row in rows]), torch.stack([row["targets"] for row in rows])


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


class ShorterOnRank1(OwnLoader):
    def build_training_data_loader(self):
        count = 64 - 24 * self.context.distributed.get_rank()
        return data.DataLoader(Shared(count), batch_size=self.micro())


class Pipeline(PipelineTrial, OwnLoader):
    """Reads ragged batches with ``ragged``; otherwise both stages read the same, or not with ``by_rank``."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.model_engine.train_batch()}

    def replica(self):
        if self.hparams.get("by_rank"):
            return self.context.distributed.get_rank(), self.context.distributed.get_size()
        return super().replica()

    def build_training_data_loader(self):
        count = self.hparams["num_records"] - (2 if self.hparams.get("ragged") else 0)
        return data.DataLoader(Shared(count, *self.replica()), batch_size=self.micro())
