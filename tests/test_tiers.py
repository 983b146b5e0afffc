"""Tests mean what they say: one without a marker starts no process, and a warning of ours fails it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

TESTS = """
import os, socket, subprocess, threading
import pytest

def test_subprocess(): subprocess.run(["true"], check=True)
def test_system(): os.system("true")
def test_fork(): os.waitpid(os.fork() or os._exit(0), 0)
def test_listen(): socket.create_server(("127.0.0.1", 0)).close()
def test_connect(): socket.socket().connect_ex(("127.0.0.1", 9))
def test_thread():
    thread = threading.Thread(target=lambda: subprocess.run(["true"]))
    thread.start()
    thread.join()

@pytest.fixture(scope="session")
def made_once(): subprocess.run(["true"])
@pytest.fixture(scope="module")
def made_in_each_module(): subprocess.run(["true"])
def test_session_fixture(made_once): pass
def test_module_fixture(made_in_each_module): pass
@pytest.fixture(scope="session")
def ended_last():
    yield
    subprocess.run(["true"])
@pytest.mark.process
def test_fixture_that_outlasts_it(ended_last): pass

@pytest.mark.process
def test_process(): subprocess.run(["true"])
@pytest.mark.ranks
def test_ranks(): subprocess.run(["true"])
@pytest.mark.gpu
def test_gpu(): subprocess.run(["true"])
def test_after_marked_ones(): subprocess.run(["true"])

def test_pure(): pass
def test_import_of_a_module_that_looks_around(): import looks_around
def test_socket_of_the_file_system(): socket.socket(socket.AF_UNIX).bind("\\0dstrial-tiers")
"""
ALLOWED = {
    "process",
    "ranks",
    "gpu",
    "fixture_that_outlasts_it",
    "pure",
    "socket_of_the_file_system",
    "import_of_a_module_that_looks_around",
}
BROKEN = {
    "subprocess": "subprocess.Popen 'true'",
    "system": "os.system b'true'",
    "fork": "os.fork",
    "listen": "socket.bind ('127.0.0.1', 0)",
    "connect": "socket.connect ('127.0.0.1', 9)",
    "thread": "subprocess.Popen 'true'",
    "session_fixture": "subprocess.Popen 'true'",
    "module_fixture": "subprocess.Popen 'true'",
    "after_marked_ones": "subprocess.Popen 'true'",
}


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a pytest that loads the plugins only that it is told to: each of them costs its import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TEST_"))}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}


def run_by_our_rules(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "kept_bytecode.py", "warm_start.py"):
        rules = Path(__file__).with_name(name).read_text(encoding="utf-8")
        (folder / name).write_text(rules, encoding="utf-8")
    markers = ("process", "ranks", "gpu", "program")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in markers))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *options],
        cwd=folder,
        # Nothing here is a fork of what would import torch for it.
        env=environment(TEST_FORKS="0", **variables),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.process
def test_what_needs_a_marker_fails_by_name_without_one(tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "looks_around.py").write_text("import subprocess\nsubprocess.run(['true'])\n")

    printed = run_by_our_rules(tmp_path, "-rpE").stdout

    pattern = re.compile(
        r"^_+ ERROR at teardown of test_(\w+) _+\n(.*?)(?=^[_=]{5})", re.MULTILINE | re.DOTALL
    )
    reports = dict(pattern.findall(printed))
    assert reports.keys() == BROKEN.keys(), printed
    for name, what in BROKEN.items():
        assert what in reports[name]
        assert "mark it `process`" in reports[name]
        assert re.search(r'test_all.py", line \d+, in ', reports[name]), reports[name]
    assert set(re.findall(r"^PASSED test_all.py::test_(\w+)", printed, re.M)) == ALLOWED | BROKEN.keys()


@pytest.mark.process
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "--numprocesses", "1")])
def test_summary_counts_skipped_tests_by_reason(workers: tuple[str, ...], tmp_path: Path) -> None:
    skipped = "import pytest\n" + "".join(
        f"@pytest.mark.skipif(True, reason='Requires: [{what}]')\ndef test_{k}(): pass\n"
        for k, what in enumerate(("a browser", "mpirun", "a browser"))
    )
    (tmp_path / "test_all.py").write_text(skipped)

    printed = run_by_our_rules(tmp_path, *workers).stdout

    _, _, summary = printed.partition("3 tests were skipped")
    assert "    2  Requires: [a browser]\n    1  Requires: [mpirun]\n" in summary, printed


@pytest.mark.process
def test_examples_and_benchmarks_are_programs(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name in ("examples/test_one.py", "test_other.py"):
        (tmp_path / name).write_text("def test_it(): pass\n")

    collected = run_by_our_rules(tmp_path, "--collect-only", "-q", "-m", "program").stdout

    assert "examples/test_one.py::test_it\n\n1/2 tests collected" in collected


@pytest.mark.parametrize("module", ["dstrial", "dstrial.loop.callbacks"])
def test_a_warning_that_a_module_of_ours_causes_is_an_error(module: str) -> None:
    with pytest.raises(DeprecationWarning, match="old"):
        warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("module", ["dstrials", "determined.dstrial", "torch.nn"])
def test_a_warning_of_a_library_is_a_warning(module: str) -> None:
    with warnings.catch_warnings(record=True) as caught:  # keeps the filters, as pytest.warns does not
        warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module=module)

    assert len(caught) == 1
