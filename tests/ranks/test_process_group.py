"""Bringing DeepSpeed's process group up and down, in processes of their own."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from dstrial.testing.ranks import run_function, run_script

pytestmark = pytest.mark.process


def start_alone() -> dict[str, Any]:
    for name in [
        n for n in os.environ if n.startswith(("RANK", "WORLD", "LOCAL_", "GROUP_", "MASTER_", "DS_"))
    ]:
        del os.environ[name]
    before = dict(os.environ)
    import torch.distributed as dist

    from dstrial.ranks import device, identify, init_process_group, shutdown

    identity = identify(os.environ)
    seen: list[Any] = []
    for _ in range(2):
        init_process_group(identity, timeout_s=30)
        init_process_group(identity, timeout_s=30)
        seen.append((dist.get_world_size(), dist.get_backend(), str(device(identity)), os.environ["RANK"]))
        shutdown()
        shutdown()
        assert not dist.is_initialized()
    left = {
        name for name in os.environ.keys() - before.keys() if name.startswith(("RANK", "MASTER", "LOCAL_"))
    }
    return {"seen": seen, "left": left, "accelerator": os.environ["DS_ACCELERATOR"]}


def test_a_single_rank_off_any_launcher_starts_twice_and_leaves_no_variable() -> None:
    (result,) = run_function(start_alone, 1)
    assert result.value == {"seen": [(1, "gloo", "cpu", "0")] * 2, "left": set(), "accelerator": "cpu"}


def respect_the_users_own_group() -> list[bool]:
    import torch.distributed as dist

    from dstrial.ranks import identify, init_process_group, shutdown

    os.environ["DET_MANUAL_INIT_DISTRIBUTED"] = "1"
    init_process_group(identify(os.environ), timeout_s=30)
    seen = [dist.is_initialized()]
    del os.environ["DET_MANUAL_INIT_DISTRIBUTED"]
    dist.init_process_group("gloo")
    init_process_group(identify(os.environ), timeout_s=30)
    shutdown()
    return [*seen, dist.is_initialized()]


def test_a_group_that_the_user_made_is_neither_replaced_nor_ended() -> None:
    assert [result.value for result in run_function(respect_the_users_own_group, 2)] == [[False, True]] * 2


def start_on_a_taken_port() -> str:
    from dstrial.errors import RankError
    from dstrial.ranks import identify, init_process_group

    with socket.socket() as other_program:
        other_program.bind(("127.0.0.1", 0))
        other_program.listen()
        os.environ["MASTER_PORT"] = str(other_program.getsockname()[1])
        try:
            init_process_group(identify(os.environ), timeout_s=10)
        except RankError as error:
            return str(error)
    return ""


def test_a_taken_port_is_named_with_the_way_out() -> None:
    (result,) = run_function(start_on_a_taken_port, 1)
    assert "is in use by another program" in result.value
    assert "Set MASTER_PORT" in result.value


def test_identify_needs_no_torch(tmp_path: Any) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "import sys\n"
        "from dstrial.ranks import StopSignals, identify\n"
        "import os\n"
        "print(identify(os.environ).rank, 'torch' in sys.modules)\n"
    )
    assert [result.stdout for result in run_script(script, 2)] == ["0 False\n", "1 False\n"]
