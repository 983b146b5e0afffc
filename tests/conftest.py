"""Hooks and fixtures of all tests: tiers, order, shared servers, leak checks."""

from __future__ import annotations

import atexit
import compileall
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import kept_bytecode
import pytest
import warm_start
from hypothesis import HealthCheck, settings

import dstrial
from dstrial.fork_server import client
from dstrial.master.store import users
from dstrial.testing import master, ranks
from dstrial.testing.master import MasterForTest, master_for_test

if TYPE_CHECKING:
    from object_store import Bucket

# Hypothesis's deadline and health check would fail tests on a busy machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_SETTLE_S = 5.0
# Directories of tests that run programs which use the package.
_PROGRAMS = {Path(__file__).with_name("examples"), Path(__file__).with_name("benchmarks")}
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


# Audit events of process starts and network connections: https://docs.python.org/3/library/audit_events.html
_STARTS_A_PROCESS = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
}
_USES_THE_NETWORK = {"socket.bind", "socket.connect"}
_TIERS_WITH_PROCESSES = ("process", "ranks", "gpu")
# Forbidden actions of the running test without a marker; None if no such test is running.
_broken_rules: list[str] | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Set up signal handlers, garbage collection, the audit hook and forks."""
    if kept_bytecode.WAS_OFF and not hasattr(config, "workerinput"):
        # Hundreds of programs import dstrial. Files of tests get no bytecode: tests rewrite them within a second.
        compileall.compile_dir(Path(dstrial.__file__).parent, quiet=2)
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until all test files are imported: the collector would scan a million objects repeatedly
    if hasattr(config, "workerinput"):
        atexit.register(_leave_memory_to_the_kernel)
    sys.addaudithook(_note_what_breaks_the_tier)
    # Programs that these modules start are forks of a preloaded process.
    vars(ranks)["subprocess"] = types.SimpleNamespace(Popen=warm_start.Popen)
    vars(client)["subprocess"] = types.SimpleNamespace(
        Popen=warm_start.Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    vars(master)["subprocess"] = types.SimpleNamespace(run=warm_start.run_command, DEVNULL=subprocess.DEVNULL)
    vars(users)["_COST"] = 2**4  # cheap password hashes in this process; other programs hash at full cost
    # A shell that starts pytest in the background ignores these signals, and programs of tests would inherit that.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _leave_memory_to_the_kernel() -> None:
    """Exit a worker after other exit handlers, without two seconds of teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start ``warm_start``'s preloaded process in the background if tests need it."""
    sys.dont_write_bytecode = kept_bytecode.WAS_OFF
    gc.freeze()
    gc.enable()
    names = ("process", "ranks")
    if any(item.get_closest_marker(name) for item in session.items for name in names):
        warm_start.share()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests per reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section(f"{len(skipped)} tests were skipped")
        for reason, number in reasons.most_common():
            terminalreporter.write_line(f"{number:>5}  {reason}")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, mark tests that run programs, trim ``exhaustive`` marks."""
    _sort_longest_first(items)
    for item in items:
        if not _PROGRAMS.isdisjoint(item.path.parents):
            item.add_marker("program")
    _unmark_stand_ins(items)


def _sort_longest_first(items: list[pytest.Item]) -> None:
    """Sort files by expected duration, longest first, so that workers end together.

    Sort keys: largest ``timeout`` mark, any test with ranks, any test with processes, number of tests.
    """
    weights: dict[Path, list[float]] = {}
    for item in items:
        weight = weights.setdefault(item.path, [0.0, 0.0, 0.0, 0.0])
        limit = item.get_closest_marker("timeout")
        seen = (limit.args[0] if limit else 0.0, "ranks" in item.keywords, "process" in item.keywords)
        weight[:] = [*map(max, weight, map(float, seen)), weight[3] + 1]
    items.sort(key=lambda item: weights[item.path], reverse=True)  # stable: the order within a file stays


def _unmark_stand_ins(items: list[pytest.Item]) -> None:
    """Remove the mark ``exhaustive`` from the ``[parameters]`` that the mark names.

    Raises:
        pytest.UsageError: the mark names parameters that the test does not have.
    """
    tests: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            test, bracket, rest = item.nodeid.partition("[")
            tests.setdefault(test, {})[bracket + rest] = item
    for test, by_parameters in tests.items():
        (mark,) = next(iter(by_parameters.values())).iter_markers("exhaustive")
        for name in (each for each in mark.args if each.startswith("[")):
            if name in by_parameters:
                by_parameters[name].own_markers.remove(mark)
            elif len(by_parameters) > 1:  # otherwise the command line selected other parameters
                raise pytest.UsageError(
                    f"{test} is exhaustive but for {name}; expected one of {sorted(by_parameters)}. Correct the mark."
                )


def _note_what_breaks_the_tier(event: str, arguments: tuple[object, ...]) -> None:
    if _broken_rules is None:
        return
    if event in _STARTS_A_PROCESS:
        what = f"{event} {arguments[0]!r:.200}" if arguments else event
    elif event in _USES_THE_NETWORK and not isinstance(
        arguments[1], (str, bytes)
    ):  # AF_UNIX addresses are strings
        what = f"{event} {arguments[1]}"
    else:
        return
    stack = traceback.extract_stack()[:-1]
    if any(frame.filename == "<frozen importlib._bootstrap>" for frame in stack):
        return  # a library's probe at its first import, such as urllib3's for IPv6
    frames = [frame for frame in stack if not {"_pytest", "pluggy"} & set(Path(frame.filename).parts)]
    _broken_rules.append(what + "\n" + "".join(traceback.format_list(frames[-8:])))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Record forbidden actions of a test without a marker and of its fixtures."""
    global _broken_rules
    _broken_rules = None if any(map(item.get_closest_marker, _TIERS_WITH_PROCESSES)) else []
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Fail a test without a marker that started a process or used the network."""
    global _broken_rules
    broken = _broken_rules
    if nextitem is None or nextitem.path != item.path:
        _broken_rules = None  # the teardown of module and session fixtures does not count for this test
    try:
        yield
    finally:
        _broken_rules = None
    if broken:
        pytest.fail(
            "the test has no marker and yet did this; mark it `process`, or `ranks` where it trains:\n"
            + "\n".join(broken),
            pytrace=False,
        )


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """Return a bucket of a local S3 server that checks credentials."""
    from object_store import s3_server

    with s3_server(tmp_path_factory.mktemp("moto")) as made:
        yield made


@pytest.fixture(scope="session")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """Return a master with 4 slots, shared by tests that need no master of their own."""
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=4) as master:
        yield master


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function (name, shell text) that puts a command first on PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands), prepend=":")

    def write(name: str, text: str) -> None:
        (commands / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (commands / name).chmod(0o755)

    return write


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    if after == before:
        return
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
    """Return the process ids of this process's children, without zombies."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = [int(pid) for pid in (task / "children").read_bytes().split()]
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
    # The resource tracker and the fork servers live as long as this process.
    if b"multiprocessing.resource_tracker" in command or pid in warm_start.servers:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
