"""When ranks count as stalled, who holds the others up, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from dstrial.errors import ConfigError
from dstrial.launch.stalls.stacks import Frame, Place, Wait
from dstrial.launch.stalls.stall_account import account, account_of_save, sentence
from dstrial.launch.stalls.stall_rules import (
    STOPPED_AFTER_S,
    RankView,
    Stall,
    StallSettings,
    is_told,
    longest_of,
    may_restart,
    stall_of,
)
from dstrial.ranks.heartbeat import Beat, Phase

NONE_ENDED = (0.0,) * len(Phase)
SETTINGS = StallSettings(timeout_s=120.0)


def view(
    rank: int,
    *,
    batch: int = 81,
    phase: Phase = Phase.BATCH,
    age_s: float = 130.0,
    waits_for_data: bool = False,
    longest_s: tuple[float, ...] = NONE_ENDED,
    **state: object,
) -> RankView:
    beat = Beat(phase, waits_for_data, batch, 0.0, 80, 0.0, 100 + rank, 1, 1, longest_s)
    return dataclasses.replace(RankView(rank, 100 + rank, beat, age_s), **state)


IN_ALL_REDUCE = Place(Wait.RANKS, "all_reduce", Frame("/home/me/model_def.py", 40, "train_batch"))
WORKS = Place(Wait.UNKNOWN, "", Frame("/home/me/model_def.py", 31, "forward"))


def test_ranks_have_stalled_when_none_has_moved_for_the_timeout_and_the_longest_so_far() -> None:
    longest_s = {Phase.BATCH: 20.0}
    assert stall_of([view(0, age_s=139), view(1, age_s=150)], longest_s, SETTINGS) is None
    found = stall_of([view(0, age_s=141), view(1, age_s=150)], longest_s, SETTINGS)
    assert found == Stall(Phase.BATCH, "batch 81", 141, 20.0, True)
    assert stall_of([], longest_s, SETTINGS) is None
    assert stall_of([view(0, phase=Phase.NONE, age_s=1e9)], longest_s, SETTINGS) is None


def test_who_waits_in_an_exchange_may_wait_as_long_as_the_batch_of_the_others() -> None:
    longest_s = {Phase.BATCH: 600.0}
    views = [view(0, phase=Phase.BETWEEN, batch=82, age_s=400), view(1, age_s=400)]
    assert stall_of(views, longest_s, SETTINGS) is None
    views = [dataclasses.replace(one, age_s=721) for one in views]
    found = stall_of(views, longest_s, SETTINGS)
    assert found is not None
    assert (found.kind, found.position, found.is_certain) == (Phase.BATCH, "batch 81", True)


def test_before_a_first_of_its_kind_has_ended_a_stall_is_certain_after_eight_timeouts() -> None:
    found = stall_of([view(0, batch=0)], {}, SETTINGS)
    assert found is not None
    assert (found.is_certain, found.longest_s) == (False, None)
    saving = stall_of([view(0, age_s=1, save_age_s=130)], {Phase.BATCH: 1.0}, SETTINGS)
    assert saving is not None
    assert not saving.is_certain
    for late in (view(0, batch=0, age_s=961), view(0, age_s=1, save_age_s=961)):
        found = stall_of([late], {Phase.BATCH: 1.0} if late.save_age_s else {}, SETTINGS)
        assert found is not None
        assert may_restart(found, StallSettings(120, "restart"), [])
        assert "may take long" not in sentence(found, account([late], {}))
    validating = view(0, phase=Phase.VALIDATION)
    found = stall_of([validating], {Phase.BATCH: 0.1}, SETTINGS)
    assert found is not None
    assert not found.is_certain
    assert "no validation has ended so far, and the first may take long" in sentence(
        found, account([validating], {})
    )
    assert not may_restart(found, StallSettings(1, "restart"), [])


def test_what_a_script_does_between_batches_is_told_as_slow_at_most() -> None:
    longest_s = {Phase.BATCH: 1.0, Phase.SCRIPT: 30.0}
    views = [view(0), view(1, phase=Phase.SCRIPT)]
    assert stall_of(views, longest_s, SETTINGS) is None
    views = [dataclasses.replace(one, age_s=151) for one in views]
    found = stall_of(views, longest_s, SETTINGS)
    assert found is not None
    assert not found.is_certain
    assert not may_restart(found, StallSettings(1, "restart"), [])
    told = sentence(found, account(views, {0: IN_ALL_REDUCE, 1: WORKS}))
    assert told.startswith(
        "slow: rank 1 is at batch 81 between batches, in forward (model_def.py:31); rank 0"
    )
    stopped = [view(0), view(1, phase=Phase.SCRIPT, is_stopped=True, stopped_s=STOPPED_AFTER_S)]
    certain = stall_of(stopped, longest_s, SETTINGS)
    assert certain is not None
    assert certain.is_certain


def test_a_stopped_rank_is_told_however_long_batches_take() -> None:
    longest_s = {Phase.BATCH: 3600.0}
    views = [view(0, age_s=12), view(1, age_s=12, is_stopped=True, stopped_s=STOPPED_AFTER_S)]
    found = stall_of(views, longest_s, SETTINGS)
    assert found is not None
    assert found.is_certain
    assert sentence(found, account(views, {0: IN_ALL_REDUCE})) == (
        "stalled: rank 1 is stopped (SIGSTOP) at batch 81 in train_batch; rank 0 waits for it in a collective "
        "(all_reduce). Nothing has moved for 10 s; the longest batch so far took 3600 s. Let it go on with "
        "`kill -CONT 101`."
    )
    short = [view(0, age_s=12), view(1, age_s=12, is_stopped=True, stopped_s=1)]
    assert stall_of(short, longest_s, SETTINGS) is None


def test_a_rank_in_a_debugger_or_in_the_kernel_is_told_from_one_that_was_stopped() -> None:
    assert "rank 1 is held by a debugger at" in account([view(1, is_stopped=True, is_traced=True)], {}).text
    told = account(
        [view(0), view(1, is_uninterruptible=True, kernel_function="nfs_wait")], {0: IN_ALL_REDUCE}
    )
    assert told.text.startswith(
        "rank 1 waits in the kernel for a device or a storage (nfs_wait) at batch 81 in"
    )
    assert told.guilty == 1


def test_who_waits_for_its_loader_holds_the_others_up() -> None:
    views = [view(rank, waits_for_data=rank == 2) for rank in range(4)]
    told = account(views, dict.fromkeys([0, 1, 3], IN_ALL_REDUCE))
    assert told.guilty == 2
    assert told.text == (
        "rank 2 waits for its data loader at batch 81 in train_batch; "
        "ranks 0, 1 and 3 wait for it in a collective (all_reduce)"
    )


def test_a_loader_that_itself_waits_for_other_ranks_is_not_to_blame() -> None:
    views = [view(0, waits_for_data=True), view(1)]
    assert account(views, {0: IN_ALL_REDUCE, 1: WORKS}).guilty == 1


def test_who_works_while_all_others_wait_holds_them_up() -> None:
    told = account([view(0), view(1)], {0: IN_ALL_REDUCE, 1: WORKS})
    assert told.guilty == 1
    assert told.text.startswith(
        "rank 1 is at batch 81 in train_batch, in forward (model_def.py:31); rank 0 waits"
    )


def test_who_waits_for_its_device_is_not_to_blame_and_who_does_not_is() -> None:
    on_device = Place(Wait.DEVICE, "", Frame("/home/me/model_def.py", 45, "train_batch"))
    views = [view(rank) for rank in range(3)]
    told = account(views, {0: on_device, 1: WORKS, 2: IN_ALL_REDUCE})
    assert told.guilty == 1
    assert told.text == (
        "rank 1 is at batch 81 in train_batch, in forward (model_def.py:31); "
        "rank 2 waits for it in a collective (all_reduce); "
        "rank 0 waits for its device at batch 81 in train_batch, in train_batch (model_def.py:45)"
    )
    in_loader = account(views, {0: on_device, 1: Place(Wait.DATA), 2: on_device})
    assert in_loader.guilty == 1
    all_wait = account(views, dict.fromkeys(range(3), on_device))
    assert all_wait.guilty is None
    assert all_wait.text.count("waits for its device") == 3
    assert "collective" in all_wait.advice
    ahead = [view(0), view(1, batch=82)]
    assert account(ahead, {0: on_device, 1: IN_ALL_REDUCE}).guilty is None


def test_nobody_is_blamed_where_no_rank_is_seen_to_wait_for_another() -> None:
    told = account([view(0), view(1)], {0: WORKS, 1: WORKS})
    assert told.guilty is None
    assert told.text == "; ".join(
        f"rank {rank} is at batch 81 in train_batch, in forward (model_def.py:31)" for rank in range(2)
    )
    assert account([view(0)], {0: WORKS}).guilty == 0


def test_ranks_in_different_collectives_are_told_with_both_places() -> None:
    barrier = Place(Wait.RANKS, "barrier", Frame("/home/me/model_def.py", 31, "train_batch"))
    told = account([view(0), view(1)], {0: barrier, 1: IN_ALL_REDUCE})
    assert told.text == (
        "rank 0 is in barrier of train_batch (model_def.py:31) at batch 81 in train_batch; "
        "rank 1 is in all_reduce of train_batch (model_def.py:40) at batch 81 in train_batch: "
        "one of them has left a collective out"
    )
    assert told.guilty is None
    ahead = account([view(0), view(1, batch=82)], {0: barrier, 1: IN_ALL_REDUCE})
    assert ahead.text.endswith(": rank 1 has left a collective out")
    assert ahead.guilty == 1


def test_all_ranks_in_one_collective_wait_for_another_machine() -> None:
    told = account([view(0), view(1)], {0: IN_ALL_REDUCE, 1: IN_ALL_REDUCE})
    assert told.text.startswith("all 2 ranks are in all_reduce of")
    assert told.guilty is None
    assert "another machine" in told.advice


def test_without_stacks_only_places_are_told() -> None:
    told = account([view(0), view(1, batch=80)], {})
    assert told == account([view(0), view(1, batch=80)], {})
    assert told.text == "rank 0 is at batch 81 in train_batch; rank 1 is at batch 80 in train_batch"


def test_a_save_in_the_background_that_never_ends_is_a_stall_of_its_own() -> None:
    saving = view(1, age_s=1, save_age_s=130)
    assert stall_of([view(0, age_s=1), saving], {Phase.SAVE: 20.0, Phase.BATCH: 1.0}, SETTINGS) is None
    found = stall_of([view(0, age_s=1), saving], {Phase.SAVE: 5.0, Phase.BATCH: 1.0}, SETTINGS)
    assert found == Stall(Phase.SAVE, "checkpoint 80", 130, 5.0, True)


def test_the_rank_that_a_checkpoint_in_the_background_waits_for_is_named() -> None:
    views = [view(rank, age_s=1, save_age_s=130) for rank in range(3)]
    writes = Place(Wait.UNKNOWN, "", Frame("/opt/dstrial/engine/state_copy.py", 325, "_save"))
    waits = Place(Wait.RANKS, "allgather")
    told = account_of_save(views, {0: waits, 1: writes, 2: waits})
    assert told.text == (
        "rank 1 writes the checkpoint at batch 80, in _save (state_copy.py:325); ranks 0 and 2 wait for it"
    )
    assert (told.guilty, told.advice) == (1, "Look at the storage.")
    none = account_of_save(views, dict.fromkeys(range(3), waits))
    assert none.guilty is None
    assert none.text.startswith("rank 0 waits for other ranks with the checkpoint at batch 80; rank 1")
    asks = account_of_save(views, {0: Place(Wait.MASTER), 1: waits, 2: waits})
    assert asks.text.startswith("rank 0 waits for an answer of the master with the checkpoint at batch 80; ")
    assert not asks.is_of_ranks


def test_the_longest_of_each_phase_is_that_of_any_rank() -> None:
    slow = (0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0)
    slower = (0.0, 0.0, 0.0, 11.0, 2.0, 0.0, 0.0, 0.0)
    found = longest_of([view(0, longest_s=slow), view(1, longest_s=slower)], 3.0)
    assert found == {Phase.BATCH: 3.0, Phase.VALIDATION: 11.0, Phase.SAVE: 2.0}


def test_a_position_is_restarted_once_and_only_where_that_is_asked_for() -> None:
    stall = Stall(Phase.BATCH, "batch 81", 130, 1.0, True)
    restart = StallSettings(120, "restart")
    assert may_restart(stall, restart, [])
    assert not may_restart(stall, restart, ["batch 81"])
    assert may_restart(stall, restart, ["batch 80"])
    assert not may_restart(stall, SETTINGS, [])
    assert not may_restart(dataclasses.replace(stall, is_certain=False), restart, [])


def test_a_master_that_does_not_answer_is_told_and_no_rank_is_ended_for_it() -> None:
    views = [view(0, phase=Phase.BETWEEN), view(1, phase=Phase.BETWEEN)]
    told = account(views, {0: Place(Wait.MASTER), 1: IN_ALL_REDUCE})
    assert told.text == (
        "rank 0 waits for an answer of the master at batch 81 between batches; "
        "rank 1 waits for it in a collective (all_reduce)"
    )
    assert "dstrial status" in told.advice
    stall = Stall(Phase.BATCH, "batch 81", 130, 1.0, True)
    assert not may_restart(stall, StallSettings(120, "restart"), [], is_of_ranks=told.is_of_ranks)


def test_a_stall_that_goes_on_is_told_ever_more_rarely() -> None:
    told: list[float] = []
    for second in range(120, 24 * 3600):
        if is_told(second, told[-1] if told else None):
            told.append(second)
    assert told[:3] == [120, 240, 480]
    assert len(told) == 10


def test_settings_come_from_the_config_and_wrong_ones_are_named() -> None:
    def read(section: dict[str, object]) -> StallSettings:
        return StallSettings.from_config({"data": {"dstrial": section}})

    assert StallSettings.from_config(None) == StallSettings(120.0, "report")
    assert read({"stall_timeout": 30, "stall_action": "restart"}) == StallSettings(30.0, "restart")
    for wrong in (0, -1, True, "2m", float("inf")):
        with pytest.raises(
            ConfigError, match=r"data\.dstrial\.stall_timeout is .*; expected a number of seconds above 0"
        ):
            read({"stall_timeout": wrong})
    with pytest.raises(ConfigError, match=r"data\.dstrial\.stall_action is .*; expected report"):
        read({"stall_action": "kill"})
