"""What every test is held to: no variable, process, thread or process group outlives it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.testing.master import MasterForTest, master_for_test

_SETTLE_S = 5.0
# Set by libraries when they are first imported, once per process and for good.
_IMPORT_TIME_VARIABLES = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TF_CPP_MIN_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CRC32C_SW_MODE",
    "DS_ACCELERATOR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
# Threads that a library keeps for the life of the process.
_LIFELONG_TARGETS = "(_serve)"  # multiprocessing's sharer of file descriptors
_LIFELONG_THREADS = ("pytest_timeout", "tqdm_monitor", "asyncio_", "Thread-pool")


def pytest_configure() -> None:
    """Let signals end the programs that tests start, though whoever started pytest in the background ignores them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """One master for all tests that only need some master; it offers 4 slots."""
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=4) as master:
        yield master


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    leaked = sorted(names - _IMPORT_TIME_VARIABLES)
    assert not leaked, f"the test left these environment variables changed: {leaked}"


@pytest.fixture(autouse=True)
def _nothing_is_left_running(_environment_is_restored: None) -> Iterator[None]:
    children_before = _children()
    threads_before = set(threading.enumerate())
    yield
    _assert_empties("child processes", lambda: _children() - children_before)
    _assert_empties(
        "threads",
        lambda: {
            thread.name
            for thread in set(threading.enumerate()) - threads_before
            if not thread.name.startswith(_LIFELONG_THREADS) and not thread.name.endswith(_LIFELONG_TARGETS)
        },
    )


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group initialized")


def _assert_empties(what: str, left: object) -> None:
    assert callable(left)
    give_up_at_s = time.monotonic() + _SETTLE_S
    while (rest := left()) and time.monotonic() < give_up_at_s:
        time.sleep(0.02)
    assert not rest, f"the test left {what} behind: {sorted(map(str, rest))}"


def _children() -> set[int]:
    """Return the ids of this process's children that still run; zombies do not count."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
        found.update(pid for pid in pids if _is_running(pid))
    return found


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if b"multiprocessing.resource_tracker" in command:  # one per process, for its whole life
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
