"""Stall detection, the choice of the straggler, and the stall message."""

from __future__ import annotations

import dataclasses

import pytest

from dstrial.errors import ConfigError
from dstrial.launch.stalls.diagnosis import (
    STOPPED_AFTER_S,
    RankView,
    Stall,
    StallSettings,
    diagnose,
    find_longest,
    find_stall,
    sentence,
)
from dstrial.launch.stalls.stacks import Frame, Place, Wait
from dstrial.ranks.heartbeat import Beat, Phase

NONE_ENDED = (0.0,) * len(Phase)
SETTINGS = StallSettings(timeout_s=120.0)


def view(
    rank: int,
    *,
    batch: int = 81,
    phase: Phase = Phase.BATCH,
    age_s: float = 130.0,
    longest_s: tuple[float, ...] = NONE_ENDED,
    **state: object,
) -> RankView:
    beat = Beat(phase, batch, 0.0, 1, 100 + rank, 1, longest_s)
    return dataclasses.replace(RankView(rank, beat, age_s), **state)


def saving(rank: int, age_s: float = 130.0, **fields: object) -> RankView:
    return view(rank, phase=Phase.SAVE, batch=80, age_s=age_s, **fields)


IN_ALL_REDUCE = Place(Wait.RANKS, "all_reduce", Frame("/home/me/model_def.py", 40, "train_batch"))
WORKS = Place(Wait.UNKNOWN, "", Frame("/home/me/model_def.py", 31, "forward"))


def test_stall_requires_timeout_plus_longest_batch() -> None:
    longest_s = {Phase.BATCH: 20.0}
    assert find_stall([view(0, age_s=139), view(1, age_s=150)], longest_s, SETTINGS) is None
    found = find_stall([view(0, age_s=141), view(1, age_s=150)], longest_s, SETTINGS)
    assert found == Stall(Phase.BATCH, 81, 141, 20.0, True)
    assert find_stall([], longest_s, SETTINGS) is None
    assert find_stall([view(0, phase=Phase.NONE, age_s=1e9)], longest_s, SETTINGS) is None


def test_stall_of_waiting_rank_uses_peers_longest_batch() -> None:
    longest_s = {Phase.BATCH: 600.0}
    views = [view(0, phase=Phase.BETWEEN, batch=82, age_s=400), view(1, age_s=400)]
    assert find_stall(views, longest_s, SETTINGS) is None
    views = [dataclasses.replace(one, age_s=721) for one in views]
    found = find_stall(views, longest_s, SETTINGS)
    assert found is not None
    assert (found.kind, found.batch, found.is_certain) == (Phase.BATCH, 81, True)


def test_stall_in_first_phase_certain_after_eight_timeouts() -> None:
    """No batch, checkpoint or validation has ended, so its usual duration is unknown."""
    found = find_stall([view(0, batch=0)], {}, SETTINGS)
    assert found is not None
    assert (found.is_certain, found.longest_s) == (False, None)
    first_save = find_stall([saving(0)], {Phase.BATCH: 1.0}, SETTINGS)
    assert first_save is not None
    assert not first_save.is_certain
    for late in (view(0, batch=0, age_s=961), saving(0, 961)):
        found = find_stall([late], {}, SETTINGS)
        assert found is not None
        assert found.is_certain
        assert "may take long" not in sentence(found, diagnose([late], {}))
    validating = view(0, phase=Phase.VALIDATION)
    found = find_stall([validating], {Phase.BATCH: 0.1}, SETTINGS)
    assert found is not None
    assert not found.is_certain
    assert "no validation has ended so far, and the first may take long" in sentence(
        found, diagnose([validating], {})
    )


def test_script_between_batches_is_slow_not_stalled() -> None:
    longest_s = {Phase.BATCH: 1.0, Phase.SCRIPT: 30.0}
    views = [view(0), view(1, phase=Phase.SCRIPT)]
    assert find_stall(views, longest_s, SETTINGS) is None
    views = [dataclasses.replace(one, age_s=151) for one in views]
    found = find_stall(views, longest_s, SETTINGS)
    assert found is not None
    assert not found.is_certain
    told = sentence(found, diagnose(views, {0: IN_ALL_REDUCE, 1: WORKS}))
    assert told.startswith(
        "slow: rank 1 is at batch 81 between batches, in forward (model_def.py:31); rank 0"
    )
    stopped = [view(0), view(1, phase=Phase.SCRIPT, state="T", stopped_s=STOPPED_AFTER_S)]
    certain = find_stall(stopped, longest_s, SETTINGS)
    assert certain is not None
    assert certain.is_certain


def test_stopped_rank_is_stall_despite_long_batches() -> None:
    longest_s = {Phase.BATCH: 3600.0}
    views = [view(0, age_s=12), view(1, age_s=12, state="T", stopped_s=STOPPED_AFTER_S)]
    found = find_stall(views, longest_s, SETTINGS)
    assert found is not None
    assert found.is_certain
    assert sentence(found, diagnose(views, {0: IN_ALL_REDUCE})) == (
        "stalled: rank 1 is stopped (SIGSTOP) at batch 81 in train_batch; rank 0 waits for it in a collective "
        "(all_reduce). Nothing has moved for 10 s; the longest batch so far took 3600 s. Continue it with "
        "`kill -CONT 101`."
    )
    short = [view(0, age_s=12), view(1, age_s=12, state="T", stopped_s=1)]
    assert find_stall(short, longest_s, SETTINGS) is None


def test_diagnose_distinguishes_debugger_and_kernel_wait() -> None:
    assert "rank 1 is held by a debugger at" in diagnose([view(1, state="t")], {}).text
    told = diagnose([view(0), view(1, state="D")], {0: IN_ALL_REDUCE})
    assert told.text.startswith("rank 1 waits in the kernel for a device or a storage at batch 81 in")
    assert told.straggler == 1


def test_rank_waiting_for_loader_is_straggler() -> None:
    views = [view(rank) for rank in range(4)]
    told = diagnose(views, {**dict.fromkeys(range(4), IN_ALL_REDUCE), 2: Place(Wait.DATA)})
    assert told.straggler == 2
    assert told.text == (
        "rank 2 waits for its data loader at batch 81 in train_batch; "
        "ranks 0, 1 and 3 wait for it in a collective (all_reduce)"
    )


def test_only_working_rank_is_straggler() -> None:
    told = diagnose([view(0), view(1)], {0: IN_ALL_REDUCE, 1: WORKS})
    assert told.straggler == 1
    assert told.text.startswith(
        "rank 1 is at batch 81 in train_batch, in forward (model_def.py:31); rank 0 waits"
    )


def test_rank_waiting_for_device_is_not_straggler() -> None:
    on_device = Place(Wait.DEVICE, "", Frame("/home/me/model_def.py", 45, "train_batch"))
    views = [view(rank) for rank in range(3)]
    told = diagnose(views, {0: on_device, 1: WORKS, 2: IN_ALL_REDUCE})
    assert told.straggler == 1
    assert told.text == (
        "rank 1 is at batch 81 in train_batch, in forward (model_def.py:31); "
        "rank 2 waits for it in a collective (all_reduce); "
        "rank 0 waits for its device at batch 81 in train_batch, in train_batch (model_def.py:45)"
    )
    in_loader = diagnose(views, {0: on_device, 1: Place(Wait.DATA), 2: on_device})
    assert in_loader.straggler == 1
    all_wait = diagnose(views, dict.fromkeys(range(3), on_device))
    assert all_wait.straggler is None
    assert all_wait.text.count("waits for its device") == 3
    assert "collective" in all_wait.hint
    ahead = [view(0), view(1, batch=82)]
    assert diagnose(ahead, {0: on_device, 1: IN_ALL_REDUCE}).straggler is None


def test_no_straggler_when_no_rank_waits_for_another() -> None:
    told = diagnose([view(0), view(1)], {0: WORKS, 1: WORKS})
    assert told.straggler is None
    assert told.text == "; ".join(
        f"rank {rank} is at batch 81 in train_batch, in forward (model_def.py:31)" for rank in range(2)
    )
    assert diagnose([view(0)], {0: WORKS}).straggler == 0


def test_different_collectives_are_reported_with_both_places() -> None:
    barrier = Place(Wait.RANKS, "barrier", Frame("/home/me/model_def.py", 31, "train_batch"))
    told = diagnose([view(0), view(1)], {0: barrier, 1: IN_ALL_REDUCE})
    assert told.text == (
        "rank 0 is in barrier of train_batch (model_def.py:31) at batch 81 in train_batch; "
        "rank 1 is in all_reduce of train_batch (model_def.py:40) at batch 81 in train_batch: "
        "one of them has left a collective out"
    )
    assert told.straggler is None
    ahead = diagnose([view(0), view(1, batch=82)], {0: barrier, 1: IN_ALL_REDUCE})
    assert ahead.text.endswith(": rank 1 has left a collective out")
    assert ahead.straggler == 1


def test_all_ranks_in_same_collective_blame_other_machine() -> None:
    told = diagnose([view(0), view(1)], {0: IN_ALL_REDUCE, 1: IN_ALL_REDUCE})
    assert told.text.startswith("all 2 ranks are in all_reduce of")
    assert told.straggler is None
    assert "another machine" in told.hint


def test_diagnose_without_stacks_reports_only_positions() -> None:
    told = diagnose([view(0), view(1, batch=80)], {})
    assert told == diagnose([view(0), view(1, batch=80)], {})
    assert told.text == "rank 0 is at batch 81 in train_batch; rank 1 is at batch 80 in train_batch"


def test_longest_phase_is_maximum_over_ranks() -> None:
    slow = (0.0, 3.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0)
    slower = (0.0, 2.0, 0.0, 11.0, 2.0, 0.0, 0.0, 0.0)
    found = find_longest([view(0, longest_s=slow), view(1, longest_s=slower)])
    assert found == {Phase.BATCH: 3.0, Phase.VALIDATION: 11.0, Phase.SAVE: 2.0}
    assert find_longest([]) == {}


def test_wait_for_master_is_attributed_to_master() -> None:
    views = [view(0, phase=Phase.BETWEEN), view(1, phase=Phase.BETWEEN)]
    told = diagnose(views, {0: Place(Wait.MASTER), 1: IN_ALL_REDUCE})
    assert told.text == (
        "rank 0 waits for a response of the master at batch 81 between batches; "
        "rank 1 waits for it in a collective (all_reduce)"
    )
    assert "dstrial status" in told.hint
    assert told.is_of_master


def test_settings_from_config_reject_invalid_values() -> None:
    def read(section: dict[str, object]) -> StallSettings:
        return StallSettings.from_config({"data": {"dstrial": section}})

    assert StallSettings.from_config(None) == StallSettings(120.0, "report")
    assert read({"stall_timeout": 30, "stall_action": "restart"}) == StallSettings(30.0, "restart")
    for wrong in (0, -1, True, "2m"):
        with pytest.raises(
            ConfigError, match=r"data\.dstrial\.stall_timeout is .*; expected a number of seconds above 0"
        ):
            read({"stall_timeout": wrong})
    with pytest.raises(
        ConfigError, match=r"data\.dstrial\.stall_action is .*; expected one of .report., .restart."
    ):
        read({"stall_action": "kill"})


def test_stalled_zero3_gather_hints_at_leaf_modules() -> None:
    gathers = dataclasses.replace(IN_ALL_REDUCE, operation="all_gather", gathers_weights=True)
    for other in (gathers, IN_ALL_REDUCE):
        found = diagnose([view(0), view(1)], {0: gathers, 1: other})
        assert "an expert without tokens on some rank" in found.hint
        assert "set_z3_leaf_modules" in found.hint
    assert "set_z3_leaf_modules" not in diagnose([view(0)], {0: gathers}).hint
    assert (
        "set_z3_leaf_modules" not in diagnose([view(0), view(1)], {0: IN_ALL_REDUCE, 1: IN_ALL_REDUCE}).hint
    )
