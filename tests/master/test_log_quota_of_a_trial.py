"""Log quota of real trials, and disk use of output during a master outage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from submitting import config, log_of, submit, trials, wait_until
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

WAITING = """
import pathlib, time
print("begun", flush=True)
while not pathlib.Path({go!r}).exists():
    time.sleep(0.01)
for number in range(100_000):
    print(f"line {{number:05}}")
print("ended", flush=True)
pathlib.Path({done!r}).touch()
"""
FLOOD = """
for number in range(60_000):
    print(f"line {number:05}")
raise RuntimeError("went wrong at last")
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    directory = tmp_path_factory.mktemp("master")
    settings = directory / "master.yaml"
    settings.write_text("limits: {trial_log_bytes: 1048576}\n")
    with master_for_test(directory, num_slots=2, options=("--config-file", str(settings))) as running:
        yield running


def assert_ends_with_line(lines: list[str], number: int) -> None:
    """Assert that printed lines are stored in order, each once, up to line ``number``."""
    printed = [int(line.rpartition(" ")[2]) for line in lines if "|| line " in line]
    assert printed[-1] == number
    assert printed == sorted(set(printed))
    assert len(printed) < 10_000


def test_flooded_log_keeps_its_end(master: MasterForTest) -> None:
    flood = submit(master, config(), FLOOD)
    wait_until(master, flood, "ERROR")
    other = submit(master, config("echo hello"))
    wait_until(master, other, "COMPLETED")
    shown = master.det("trial", "logs", str(trials(master, flood)[0]["id"])).stdout
    size = master.state.database_path.stat().st_size

    assert_ends_with_line(shown.splitlines(), 59_999)
    assert "RuntimeError: went wrong at last" in shown
    (crashed,) = [line for line in shown.splitlines() if " crashed: " in line]
    assert "RuntimeError: went wrong at last" in crashed
    assert "the log is larger than limits.trial_log_bytes" in shown
    assert size < 8 * 2**20
    assert "hello" not in shown


def test_output_during_master_outage_is_bounded_on_disk(master: MasterForTest, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    experiment_id = submit(master, config(), WAITING.format(go=str(go), done=str(done)))
    wait_for(lambda: "begun" in log_of(master, experiment_id))
    master.kill()
    go.touch()
    wait_for(done.exists)
    files = list((master.state.path / "allocations").glob("*/output.log*"))
    taken = sum(path.stat().st_size for path in files)
    master.up()
    wait_until(master, experiment_id, "COMPLETED")
    lines = log_of(master, experiment_id).splitlines()

    assert taken < 2 * 2**20
    assert_ends_with_line(lines, 99_999)
    assert any("ended" in line for line in lines)
    assert any("left out" in line for line in lines)
