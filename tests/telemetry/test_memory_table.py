"""The table of where memory went: rank 0, the rank that has most, and what was predicted for each."""

from __future__ import annotations

from dstrial.telemetry.memory_table import memory_rows

MIB = 2**20


def rank(peak: float, **more: float) -> dict[str, float]:
    parts = {"parameters": 100.0, "gradients": 100.0, "optimizer": 0.5, "activations": 1200.0, "buffers": 0.0}
    return {
        **{f"{part}_bytes": value * MIB for part, value in {**parts, **more}.items()},
        "tensors_peak_bytes": peak * MIB,
        "process_peak_memory_bytes": 1.0,
    }


def test_rank_0_and_the_one_that_has_most_are_shown_and_what_was_predicted_for_their_stages() -> None:
    stages = [{"parameters": 99.0 * MIB, "peak": 1500.0 * MIB}, {"parameters": 50.0 * MIB}]
    rows = memory_rows([rank(1500), rank(1400), rank(1600, parameters=55.0), rank(1550)], stages)

    assert rows == [
        ("memory, MiB", "parameters  gradients  optimizer  activations  buffers   peak"),
        ("  rank 0", "       100        100        0.5        1,200        0  1,500"),
        ("    predicted", "        99          ?          ?            ?        ?  1,500"),
        ("  rank 2, most", "        55        100        0.5        1,200        0  1,600"),
        ("    predicted", "        50          ?          ?            ?        ?      ?"),
    ]


def test_one_rank_has_one_line_and_all_are_shown_where_all_are_asked_for() -> None:
    assert [name for name, _ in memory_rows([rank(1)])] == ["memory, MiB", "  rank 0"]
    names = [name for name, _ in memory_rows([rank(3), rank(2), rank(1)], shows_all=True)]
    assert names == ["memory, MiB", "  rank 0, most", "  rank 1", "  rank 2"]


def test_what_was_not_measured_has_no_line_and_no_column() -> None:
    assert memory_rows([{"process_peak_memory_bytes": 1}]) == []
    unknown = {
        name: value for name, value in rank(1).items() if "activations" not in name and "peak" not in name
    }
    heads, *_ = memory_rows([unknown])
    assert heads[1].split() == ["parameters", "gradients", "optimizer", "buffers"]


def test_buffers_that_are_larger_than_all_else_are_explained() -> None:
    note = (
        "  buffers",
        "mostly DeepSpeed's for messages: as large as zero_optimization.reduce_bucket_size says, used or not",
    )
    assert memory_rows([rank(3500, buffers=1500.0)])[-1] == note
    assert note not in memory_rows([rank(3500, buffers=1300.0)])
    small = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 1.0)
    assert note not in memory_rows([rank(60, buffers=50.0, **small)])
