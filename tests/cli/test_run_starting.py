"""Output, log and status show that a start waits for slots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from waiting import wait_for

from dstrial.master.store.views import observe
from dstrial.testing.master import master_for_test

DEADLINE_S = 300

HOLD_SCRIPT = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
CONFIG = """
name: {name}
entrypoint: ["python3", "holds.py", "{until}"]
max_restarts: 0
resources: {{slots_per_trial: {slots}}}
searcher: {{name: single, metric: loss, max_length: {{batches: 1}}}}
"""


@pytest.mark.ranks
def test_waiting_trial_names_holder_of_slots(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "holds.py").write_text(HOLD_SCRIPT)
    done, done_already = tmp_path / "done", tmp_path / "done already"
    done_already.touch()
    for name, until, slots in (("holding", done, 1), ("waits", done_already, 2)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(name=name, until=until, slots=slots))
    with master_for_test(tmp_path, num_slots=2) as master:
        created = master.det("e", "create", "holding.yaml", "context", cwd=tmp_path)
        assert created.returncode == 0, created.stderr
        (holder,) = master.client().get("/api/v1/experiments?limit=-1")["experiments"]
        process = warm_start.Popen(
            [sys.executable, "-m", "dstrial.cli", "run", "waits.yaml", "context", "--no-progress"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(master.env),
            cwd=tmp_path,
        )
        try:
            wait_for(lambda: observe.starting(master.state), "the status tells of nobody who waits")
            (waiting,) = json.loads(master.dstrial("status", "--json").stdout)["starting"]
            text = f"waiting for 2 slots: 1 of 2 is in use, by trial 1 of experiment {holder['id']} on 1"
            assert waiting["phase"] == text
            shown = master.dstrial("status").stdout
            assert f"trial {waiting['trial']} of experiment {waiting['experiment']} is {text}" in shown
            logged = master.det("trial", "logs", str(waiting["trial"])).stdout
            assert logged.count(text) == 1
        finally:
            done.touch()
            printed, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, printed
        assert printed.count(text) == 1
        assert json.loads(master.dstrial("status", "--json").stdout)["starting"] == []
