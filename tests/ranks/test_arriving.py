"""Ranks find out whether the others are where they are, without waiting in a collective for one that never comes."""

from __future__ import annotations

import os

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks


def meet() -> dict[str, bool]:
    from dstrial.ranks import process_group
    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    identity = identify(os.environ)
    process_group.init_process_group(identity, timeout_s=60)
    channel = ControlChannel(identity, timeout_s=60)
    found = {}
    channel.arrive("first")
    found["together"] = channel.all_arrived("first", 20)
    channel.allgather(None)
    if identity.rank == 0:
        channel.arrive("alone")
        found["alone"] = channel.all_arrived("alone", 0.5)
    channel.broadcast(None)
    channel.arrive("last" if identity.rank == 0 else "elsewhere")
    found["elsewhere"] = channel.all_arrived("last" if identity.rank == 0 else "elsewhere", 0.5)
    # Nothing was begun that would have to be ended: the channel goes on.
    found["goes on"] = channel.allgather(identity.rank) == [0, 1]
    channel.close()
    process_group.shutdown()
    return found


def test_ranks_meet_or_are_told_that_they_do_not() -> None:
    chief, other = (result.value for result in run_function(meet, 2, deadline_s=90))

    assert chief == {"together": True, "alone": False, "elsewhere": False, "goes on": True}
    assert other == {"together": True, "elsewhere": False, "goes on": True}
