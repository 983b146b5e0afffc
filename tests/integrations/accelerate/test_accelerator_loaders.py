"""Epoch lengths of an accelerator's data loaders."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from dstrial.errors import DataError
from dstrial.integrations.accelerate.accelerator import epoch_length_of


def share_of(num_records: int, num_ranks: int, *, drop_last: bool) -> DataLoader[int]:
    """Return the loader of rank 0 of ``num_ranks``, in micro batches of 4 records."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader

    loader: DataLoader[int] = DataLoader(range(num_records), batch_size=4, drop_last=drop_last)  # type: ignore[arg-type]
    prepared: DataLoader[int] = prepare_data_loader(
        loader, num_processes=num_ranks, process_index=0, put_on_device=False
    )
    return prepared


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_records", [15, 16, 17, 31, 52, 53])
def test_epoch_length_is_independent_of_rank_count(num_records: int, drop_last: bool) -> None:
    # Batches of 16 records, in micro batches of 4.
    if drop_last and num_records < 16:
        with pytest.raises(DataError, match="expected a whole batch"):
            epoch_length_of(share_of(num_records, 1, drop_last=True), 4)
        return
    expected = num_records // 16 if drop_last else -(-num_records // 16)
    for num_ranks in (1, 2, 4):
        assert (
            epoch_length_of(share_of(num_records, num_ranks, drop_last=drop_last), 4 // num_ranks) == expected
        )


def test_loader_without_length_or_records_is_rejected() -> None:
    with pytest.raises(DataError, match="without a length"):
        epoch_length_of(iter([]), 1)
    with pytest.raises(DataError, match="0 micro batches"):
        epoch_length_of([], 1)
