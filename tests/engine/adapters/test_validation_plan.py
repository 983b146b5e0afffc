import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.engine.adapters.validation_plan import ValidationRound, plan_validation

records = st.integers(0, 200)
sizes = st.integers(1, 9)
replicas = st.integers(1, 5)
accumulation = st.integers(1, 4)

Plans = list[tuple[ValidationRound, ...]]


def evaluated(plans: Plans) -> list[int]:
    """Return the record positions that count, over all replicas and rounds."""
    return [
        position
        for plan in plans
        for one in plan
        if one.records
        for start, stop in one.record_ranges
        for position in range(start, stop)
    ]


def assert_sound(plans: Plans, num_records: int) -> None:
    assert sorted(evaluated(plans)) == list(range(num_records))
    assert len({len(plan) for plan in plans}) == 1
    for of_round in zip(*plans, strict=True):
        assert len({one.is_ragged for one in of_round}) == 1
        for one in of_round:
            assert one.records in (0, sum(one.micro_batch_records))
            assert all(0 <= start < stop <= num_records for start, stop in one.record_ranges)


@given(records, sizes, replicas, accumulation)
def test_pipelines_evaluate_every_record_once_in_step(n: int, size: int, num: int, per_round: int) -> None:
    plans = [plan_validation(n, size, per_round, replica, num) for replica in range(num)]
    assert_sound(plans, n)
    for of_round in zip(*plans, strict=True):
        assert len({one.num_micro_batches for one in of_round}) == 1
    shape = [(one.num_micro_batches, one.is_ragged) for one in plans[0]]
    full, rest = divmod(n // (size * num), per_round)
    expected = [(per_round, False)] * full + ([(rest, False)] if rest else [])
    assert shape == expected + ([(1, True)] if n % (size * num) else [])


@given(records, sizes, replicas, accumulation)
def test_leftover_records_are_spread_evenly(n: int, size: int, num: int, per_round: int) -> None:
    last = [plan_validation(n, size, per_round, replica, num)[-1:] for replica in range(num)]
    counts = [one.records for plan in last for one in plan if one.is_ragged]
    assert not counts or max(counts) - min(counts) <= 1
    assert all(count <= size for count in counts)


@given(records, sizes, replicas, st.booleans())
def test_data_parallel_replicas_evaluate_every_record_once(
    n: int, size: int, num: int, collective: bool
) -> None:
    plans = [plan_validation(n, size, 1, r, num, forward_is_collective=collective) for r in range(num)]
    assert_sound(plans, n)
    for one in (one for plan in plans for one in plan):
        assert one.num_micro_batches == 1 or (not collective and one.num_micro_batches == one.records == 0)


def test_whole_micro_batches_alternate_between_replicas() -> None:
    first, second = (plan_validation(22, 4, 2, replica, 2) for replica in range(2))
    assert [one.record_ranges for one in first] == [((0, 4), (8, 12)), ((16, 19),)]
    assert [one.record_ranges for one in second] == [((4, 8), (12, 16)), ((19, 22),)]


def test_idle_replica_repeats_record_for_collective_forward() -> None:
    filler = plan_validation(9, 4, 1, 1, 2, forward_is_collective=True)[-1]
    assert (filler.records, filler.record_ranges, filler.is_filler) == (0, ((8, 9),), True)
    idle = plan_validation(9, 4, 1, 1, 2, forward_is_collective=False)[-1]
    assert (idle.records, idle.num_micro_batches, idle.is_filler) == (0, 0, False)
    assert plan_validation(9, 4, 2, 1, 2)[-1].is_filler


@pytest.mark.parametrize("arguments", [(-1, 1, 1, 0, 1), (1, 0, 1, 0, 1), (1, 1, 0, 0, 1), (1, 1, 1, 2, 2)])
def test_impossible_arguments_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be planned"):
        plan_validation(*arguments)
