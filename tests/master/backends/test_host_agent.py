"""The agent of a host, asked as the master asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dstrial.hosts.remote import PREFIX
from dstrial.master.backends import AllocationRequest

pytestmark = pytest.mark.process


def test_files_forged_on_a_host_hide_no_end(tmp_path: Path) -> None:
    forging = "rm -f output.log.*; touch output.log.x; mkfifo output.log.9.9 stalled.json ending.json"
    request = AllocationRequest(
        allocation_id="1.x.1", task_id="1.x", trial_id=1, experiment_id=1, run_id=1, directory=tmp_path, slots=(),
        ports={}, config={}, hparams={}, trial_seed=1, steps_completed=0, latest_checkpoint=None, session_token="s",
        user_token="u", username="determined", master_url="http://127.0.0.1:1", cluster_id="c", master_id="m",
        agent_id="a", resources_id="r", model_definition=b"",
        entrypoint=f"cd $DSTRIAL_ALLOCATION_DIR; {forging}; echo printed; exit 4",
    )  # fmt: skip
    hello = {
        "host": "here", "cluster_id": "c", "slots": [0], "is_warm": False, "forks_with_accelerators": False,
        "warm_idle_timeout_s": 1, "warm_memory_bytes": 1, "live": [], "umask": None,
    }  # fmt: skip
    submit = {"do": "submit", "id": "1.x.1", "slots": [0], "bytes": 0, "request": request.to_json()}
    command = [sys.executable, "-u", "-m", "dstrial.master.backends.hosts.agent"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSTRIAL_STATE_DIR": str(tmp_path / "state")},
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        late = threading.Timer(30, agent.kill)
        late.start()
        print(json.dumps(hello), json.dumps(submit), sep="\n", file=agent.stdin, flush=True)
        said: list[dict[str, Any]] = []
        for line in agent.stdout:
            said.append(json.loads(line.removeprefix(PREFIX)))
            if "exit" in said[-1]:
                break
            print(file=agent.stdin, flush=True)
        late.cancel()
        agent.stdin.close()
    assert (said[-1].get("exit"), said[-1].get("exit_code")) == ("1.x.1", 4), said
    assert any(one.get("part") == "output.log" for one in said)
