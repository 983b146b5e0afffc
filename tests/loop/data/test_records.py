"""Seeds and worker_init_fn of records that loader workers read."""

import numpy as np
import pytest
import torch
from determined import pytorch
from torch.utils import data

from dstrial.loop.data.order import BatchGeometry, GlobalBatches, ReplicaSampler, SamplerOrder
from dstrial.loop.data.records import SeededRecords, torch_loader

pytestmark = pytest.mark.process


class Noise(data.Dataset):
    """Dataset of random numbers from torch and NumPy, and of its attribute ``opened``."""

    opened = 0.0

    def __len__(self):
        return 6

    def __getitem__(self, record):
        return torch.tensor([float(torch.rand(())), float(np.random.rand()), self.opened])


def read(sampler, num_batches, with_epoch=True, **options):
    dataset = Noise()
    loader = pytorch.DataLoader(dataset, batch_size=2, num_workers=1, **options)
    batches = GlobalBatches(SamplerOrder(sampler, 0), 6, BatchGeometry(2, 1, 1), keep_tail=True)
    made = torch_loader(loader, SeededRecords(dataset, 3), ReplicaSampler(batches, 0, 0, with_epoch), 3)
    items = iter(made)
    return torch.cat([next(items) for _ in range(num_batches)])


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor], ids=["int", "NumPy", "tensor"])
def test_records_have_distinct_seeds_for_any_index_type(kind):
    class Sampler:
        def __iter__(self):
            return iter([kind(record) for record in range(6)])

        def __len__(self):
            return 6

    values = read(Sampler(), 6)
    assert len(set(values[:, 0].tolist())) == 12
    assert torch.equal(values, read(Sampler(), 6))


def open_file(worker_idx):
    data.get_worker_info().dataset.opened = 7.0


def test_worker_init_fn_sees_user_dataset():
    values = read(range(6), 2, worker_init_fn=open_file)
    assert set(values[:, 2].tolist()) == {7.0}
