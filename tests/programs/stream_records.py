"""Data sets that shard their records, importable without DeepSpeed."""

import torch
from small_records import Records
from torch.utils import data


class Shared(data.IterableDataset):
    """An iterable data set that is sharded over replicas and loader workers."""

    def __init__(self, count, replica=0, replicas=1):
        self.records = Records(count, 1)
        self.replica, self.replicas = replica, replicas

    def __iter__(self):
        worker = data.get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(self.replica, len(self.records), self.replicas)
        return (self.records[idx] for idx in mine[part::parts])


class Stateful(Shared):
    """Saves its position in ``state_dict``, also in the middle of an epoch."""

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
    """Return a Hugging Face streaming data set of the records, for one replica."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    records = Records(count, 1)
    columns = {"features": records.features.tolist(), "targets": records.targets.tolist()}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=shards).with_format("torch")
    if buffer:
        stream = stream.shuffle(seed=5, buffer_size=buffer)
    return split_dataset_by_node(stream, replica, replicas)


def as_pair(rows):
    """Collate Hugging Face rows into the features and targets of the small trials."""
    return torch.stack([row["features"] for row in rows]), torch.stack([row["targets"] for row in rows])
