"""Ranks that wait for a rank that has left fail long before their deadline and name it."""

from __future__ import annotations

import os

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.process


def wait_for_a_rank_that_leaves() -> str:
    import torch.distributed

    from dstrial.errors import RankError
    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    torch.distributed.init_process_group("gloo")
    channel = ControlChannel(identify(os.environ), timeout_s=12.0)
    try:
        if channel.rank == 1:
            channel.leave("the upload failed")
            message = "left"
        else:
            channel.allgather(None)
            message = "went on"
    except RankError as error:
        message = str(error)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return message


def test_whoever_waits_for_a_rank_that_left_is_told_why() -> None:
    waiting, left = (result.value for result in run_function(wait_for_a_rank_that_leaves, 2))
    assert left == "left"
    assert waiting == "allgather cannot complete without a rank that has left; rank 1: the upload failed"
