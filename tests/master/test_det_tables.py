"""Tables of all ``det`` sub-commands and SDK methods, generated on a real master."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start

pytestmark = pytest.mark.process
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.exhaustive(
    "tests/master/test_det_commands.py::test_master_and_agent_commands_work",
    "tests/master/test_det_commands.py::test_sdk_reads_metrics_and_checkpoints",
)
@pytest.mark.parametrize(("script", "at_least"), [("det_command_table", 224), ("det_sdk_table", 154)])
def test_det_tables_report_no_failures(script: str, at_least: int, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
    kept |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = warm_start.run_command(
        [sys.executable, str(TOOLS / f"{script}.py"), "--out", str(tmp_path / "table.md")],
        env=kept, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    counted, _, table = (tmp_path / "table.md").read_text().partition("\n\n")
    assert int(counted.split()[0]) >= at_least
    assert "FAILS" not in table
    assert table.count("\n") == int(counted.split()[0]) + 2
