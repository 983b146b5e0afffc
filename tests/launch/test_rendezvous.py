"""Process groups of launched ranks: one node, two nodes, and torch scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_start

from dstrial.launch.local_ranks import run_ranks
from dstrial.ranks.sockets import free_port

pytestmark = pytest.mark.process

LAUNCHER = """
import json, sys
from dstrial.launch.local_ranks import Placement, run_ranks
node, port = int(sys.argv[1]), int(sys.argv[2])
outcome = run_ranks([sys.executable, *sys.argv[3:]], num_ranks=2 - node, placement=Placement((2, 1), node, "127.0.0.1", port))
sys.exit(outcome.exit_code)
"""
RANK = """
import json, os, pathlib, sys
import torch.distributed
from dstrial.ranks.control_channel import ControlChannel
from dstrial.ranks.identity import identify
from dstrial.ranks.process_group import init_process_group, shutdown
if "torch" in sys.argv[1]:
    torch.distributed.init_process_group("gloo")
identity = identify(os.environ)
init_process_group(identity, timeout_s=60)
channel = ControlChannel(identity, timeout_s=60)
told = {
    "ranks": channel.allgather([identity.rank, identity.node_rank]),
    "local": channel.allgather_local(identity.rank),
    "interfaces": [os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")],
    "secret": os.environ.get("DSTRIAL_SECRET"),
    "store": "DSTRIAL_STORE" in os.environ,
}
channel.close()
shutdown()
if "torch" in sys.argv[1]:
    torch.distributed.destroy_process_group()
pathlib.Path(sys.argv[2], f"{identity.rank}.json").write_text(json.dumps(told))
"""


# Slow: ranks import torch in new processes. The exhaustive stand-in starts its ranks as forks.
@pytest.mark.exhaustive(
    "tests/trainer/test_stalls_of_two_launchers.py::test_stall_ends_ranks_of_both_launchers"
)
@pytest.mark.parametrize("who", ["dstrial", "torch"])
def test_two_launchers_form_one_process_group(who: str, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DSTRIAL_SECRET": "of both"}
    port = str(free_port())
    launchers = [
        warm_start.Popen(
            [
                *(sys.executable, str(tmp_path / "launcher.py"), str(node), port),
                *(str(tmp_path / "rank.py"), who, str(tmp_path)),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [launcher.communicate(timeout=200)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()

    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [one["ranks"] for one in told] == [[[0, 0], [1, 0], [2, 1]]] * 3
    assert [one["local"] for one in told] == [[0, 1], [0, 1], [2]]
    # With two nodes, no loopback interface is set, and both use the secret of the environment.
    assert {json.dumps(one["interfaces"]) for one in told} == {"[null, null]"}
    assert [one["secret"] for one in told] == ["of both"] * 3
    assert not any(one["store"] for one in told)


@pytest.mark.parametrize("serves_store", [True, False])
@pytest.mark.parametrize("chosen", [None, "eth9"])
def test_single_node_defaults_to_secret_and_loopback_interface(
    serves_store: bool, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DSTRIAL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    script = "import json, os; json.dump(dict(os.environ), open(os.environ['RANK'], 'w'))"
    env = {} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen, "DSTRIAL_SECRET": "mine"}
    monkeypatch.chdir(tmp_path)

    outcome = run_ranks([sys.executable, "-c", script], num_ranks=2, env=env, serves_store=serves_store)

    assert outcome.exit_code == 0
    seen: list[dict[str, Any]] = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert {one["GLOO_SOCKET_IFNAME"] for one in seen} == {chosen or "lo"}
    assert {one["NCCL_SOCKET_IFNAME"] for one in seen} == {"lo"}
    (secret,) = {one["DSTRIAL_SECRET"] for one in seen}
    assert secret == "mine" if chosen else len(secret) == 64
    assert {one["MASTER_ADDR"] for one in seen} == {"127.0.0.1"}
    assert {one["TORCHELASTIC_USE_AGENT_STORE"] for one in seen} == {str(serves_store)}
    place = json.loads(seen[0]["DSTRIAL_STORE"])
    assert (str(place["port"]), place["num_ranks"]) == (seen[0]["MASTER_PORT"], 2)


TRIAL_SCRIPT = """
import pathlib
import torch.distributed
# At import, before dstrial creates its process group.
torch.distributed.init_process_group("gloo")
store = torch.distributed.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
pathlib.Path("store").write_text(type(store).__name__)

from dstrial import DeepSpeedTrial

class Early(DeepSpeedTrial):
    def __init__(self, context):
        raise RuntimeError(f"the ranks are {context.distributed.allgather(context.distributed.rank)}")

    build_training_data_loader = build_validation_data_loader = train_batch = None
"""


@pytest.mark.ranks
def test_process_group_created_during_import_uses_filestore(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(TRIAL_SCRIPT)
    (tmp_path / "exp.yaml").write_text(
        "name: early\nentrypoint: early:Early\n"
        "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n"
        "hyperparameters: {deepspeed_config: {train_batch_size: 2}}\n"
    )
    words = ["dstrial.launch", "--slots", "2", "--config", "exp.yaml", "--trial", "early:Early"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = warm_start.run(words, cwd=tmp_path, env=env, timeout=200)
    assert (tmp_path / "store").read_text() == "FileStore", done.stderr
    assert "RuntimeError: the ranks are [0, 1]" in done.stderr
