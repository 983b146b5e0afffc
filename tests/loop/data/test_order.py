"""Order of records, and their division into batches and micro batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data

from dstrial.errors import DataError
from dstrial.loop.data.order import (
    BatchGeometry,
    GlobalBatches,
    ReplicaSampler,
    SamplerOrder,
    ShuffledOrder,
    epoch_order,
    forked_random_state,
    record_seed,
)

SPLITS = [(1, 12, 1), (2, 6, 1), (3, 2, 2), (4, 3, 1), (1, 4, 3), (12, 1, 1), (2, 3, 2)]


def all_micro_batches(num_records, split, batch_idx, seed=3, keep_tail=True):
    micro, accumulation, replicas = split
    batches = GlobalBatches(
        ShuffledOrder(num_records, seed), num_records, BatchGeometry(micro, accumulation, replicas), keep_tail
    )
    return batches, [
        batches.micro_batch(batches.records(batch_idx), m, replica)
        for m in range(accumulation)
        for replica in range(replicas)
    ]


@settings(max_examples=40)
@given(st.integers(12, 100), st.integers(0, 20), st.sampled_from(SPLITS))
def test_batch_records_are_independent_of_split(num_records, batch_idx, split):
    one, whole = all_micro_batches(num_records, (12, 1, 1), batch_idx)
    other, parts = all_micro_batches(num_records, split, batch_idx)
    assert one.epoch_length == other.epoch_length
    assert set(whole[0]) == {record for part in parts for record in part}


@settings(max_examples=40)
@given(st.integers(12, 100), st.sampled_from(SPLITS))
def test_every_record_is_seen_once_per_epoch(num_records, split):
    batches, _ = all_micro_batches(num_records, split, 0)
    seen = []
    for batch_idx in range(batches.epoch_length):
        _, parts = all_micro_batches(num_records, split, batch_idx)
        if batches.num_records(batch_idx, batch_idx + 1) >= batches.geometry.num_slices:
            seen += [record for part in parts for record in part]
        else:
            seen += sorted({record for part in parts for record in part})
    assert sorted(seen) == list(range(num_records))


@given(st.integers(12, 100), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_num_records_equals_sum_over_batches(num_records, first, length, keep_tail):
    batches, _ = all_micro_batches(num_records, (12, 1, 1), 0, keep_tail=keep_tail)
    counted = sum(len(batches.records(batch_idx)) for batch_idx in range(first, first + length))
    assert batches.num_records(first, first + length) == counted


def test_full_micro_batches_have_micro_batch_size():
    _, parts = all_micro_batches(24, (3, 2, 2), 1)
    assert [len(part) for part in parts] == [3, 3, 3, 3]


def test_tail_is_split_evenly_without_empty_micro_batches():
    _, parts = all_micro_batches(12 + 7, (3, 2, 2), 1)
    assert sorted(len(part) for part in parts) == [1, 2, 2, 2]
    _, parts = all_micro_batches(12 + 2, (3, 2, 2), 1)
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert len({record for part in parts for record in part}) == 2


def test_epoch_without_tail_ends_at_full_batch():
    batches, _ = all_micro_batches(19, (3, 2, 2), 0, keep_tail=False)
    assert (batches.epoch_length, batches.num_tail_records, batches.keeps_tail) == (1, 7, False)


def test_too_few_records_for_one_batch_is_error():
    with pytest.raises(
        DataError, match=r"has 5 records; expected at least one batch of 12 \(3 per micro batch x 2"
    ):
        GlobalBatches(ShuffledOrder(5, 0), 5, BatchGeometry(3, 2, 2), keep_tail=False)
    with pytest.raises(DataError, match="has 0 records"):
        GlobalBatches(ShuffledOrder(0, 0), 0, BatchGeometry(3, 2, 2), keep_tail=True)


def test_shuffled_order_depends_on_seed_and_epoch():
    orders = {tuple(ShuffledOrder(50, seed)(epoch)[:]) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert ShuffledOrder(50, 1)(7)[:] == ShuffledOrder(50, 1)(7)[:]


def test_batches_in_any_order_are_slices_of_epoch():
    num_records = 2 * 150  # more batches than one block has
    order = ShuffledOrder(num_records, 1)
    batches = GlobalBatches(order, num_records, BatchGeometry(2, 1, 1), keep_tail=True)
    for batch_idx in (0, 149, 63, 64, 200, 1, 299):
        epoch_idx, in_epoch = divmod(batch_idx, 150)
        assert batches.records(batch_idx) == order(epoch_idx)[2 * in_epoch : 2 * in_epoch + 2]


@pytest.mark.parametrize("start", [0, 1, 5, 11, 12, 29])
def test_replica_sampler_resumes_at_start_batch(start):
    batches = GlobalBatches(ShuffledOrder(30, 1), 30, BatchGeometry(2, 3, 2), keep_tail=True)
    whole, rest = iter(ReplicaSampler(batches, 1, 0, True)), iter(ReplicaSampler(batches, 1, start, True))
    for _ in range(start):
        next(whole)
    assert [next(whole) for _ in range(20)] == [next(rest) for _ in range(20)]


def test_user_sampler_replay_preserves_random_state():
    class Stateful(data.Sampler):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(5)

        def __iter__(self):
            return iter(torch.randperm(10, generator=self.generator).tolist())

        def __len__(self):
            return 10

    straight = SamplerOrder(Stateful(), 0)
    epochs = [list(straight(epoch)) for epoch in range(3)]
    before = torch.random.get_rng_state()
    assert list(SamplerOrder(Stateful(), 0)(2)) == epochs[2]
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(DataError, match="epochs in order"):
        straight(0)


def test_samplers_using_global_random_state_are_reproducible():
    weighted = data.WeightedRandomSampler([1.0] * 20, 20)
    assert list(epoch_order(weighted, 20, 4)(1)) == list(epoch_order(weighted, 20, 4)(1))


def test_epoch_order_recognizes_plain_samplers():
    records = list(range(10))
    assert list(epoch_order(data.SequentialSampler(records), 10, 0)(3)) == records
    assert isinstance(epoch_order(data.RandomSampler(records), 10, 0), ShuffledOrder)
    assert isinstance(epoch_order(data.RandomSampler(records, replacement=True), 10, 0), SamplerOrder)


def test_user_generator_changes_order():
    records = list(range(30))
    seeded = data.RandomSampler(records, generator=torch.Generator().manual_seed(9))
    assert epoch_order(seeded, 30, 0)(0)[:] != epoch_order(data.RandomSampler(records), 30, 0)(0)[:]


def test_record_seeds_differ_by_seed_epoch_and_record():
    seeds = {record_seed(s, e, r) for s in range(8) for e in range(8) for r in range(200)}
    assert len(seeds) == 8 * 8 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_forked_random_state_restores_generators():
    before = torch.rand(1)
    with forked_random_state(1):
        inside = torch.rand(1)
    with forked_random_state(1):
        assert torch.equal(torch.rand(1), inside)
    assert not torch.equal(before, inside)
