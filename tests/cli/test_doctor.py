"""``dstrial doctor`` on this machine, with low limits and hanging imports."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from waiting import wait_for

GROUPS = [
    "Python",
    "Limits",
    "Storage",
    "Network",
    "Master",
    "Environment variables",
    "Devices",
    "Libraries",
    "Compilers",
]
pytestmark = pytest.mark.process


@pytest.fixture
def doctor(tmp_path):
    """Return a function that runs ``dstrial doctor`` in an empty directory."""

    def run(*arguments, before="", python=(), **variables):
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CUDA_", "DS_", "DSTRIAL_", "PYTEST_", "OMP_", "LC_"))
        }
        environ.update(
            {"DSTRIAL_STATE_DIR": str(tmp_path / "state"), "DSTRIAL_RUNS_DIR": str(tmp_path / "runs")}
        )
        environ.update({name: str(value) for name, value in variables.items() if value is not None})
        command = [sys.executable, *python, "-m", "dstrial.cli", "doctor", *arguments]
        if before:
            command = ["bash", "-c", f'{before} && exec "$@"', "bash", *command]
        (tmp_path / "cwd").mkdir(exist_ok=True)
        return subprocess.run(
            command, cwd=tmp_path / "cwd", env=environ, capture_output=True, text=True, timeout=120
        )

    return run


def findings(done):
    document = json.loads(done.stdout)
    return {finding["name"]: finding for group in document["groups"] for finding in group["findings"]}


def problems(done):
    return {name: finding for name, finding in findings(done).items() if finding["status"] == "problem"}


def _is_free(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) != 0


def test_json_report_has_documented_keys_and_exit_code(doctor, tmp_path):
    done = doctor("--json")
    document = json.loads(done.stdout)
    assert set(document) == {"schema", "dstrial", "ok", "counts", "seconds", "groups"}
    assert [group["name"] for group in document["groups"]] == GROUPS
    found = [finding for group in document["groups"] for finding in group["findings"]]
    for finding in found:
        assert set(finding) == {"name", "status", "what", "todo"}
        assert finding["status"] in ("ok", "note", "problem")
        assert bool(finding["todo"]) is (finding["status"] != "ok"), finding
    for status, number in document["counts"].items():
        assert sum(finding["status"] == status for finding in found) == number
    assert document["ok"] is (document["counts"]["problem"] == 0)
    assert done.returncode == (0 if document["ok"] else 1)
    names = findings(done)
    for name in (
        "python",
        "torch",
        "deepspeed",
        "imports",
        "driver",
        "C++ compiler",
        "/dev/shm",
    ):
        assert names[name]["status"] == "ok", names[name]
    # Port 8080 is taken if a master of the main example is running.
    assert names["master"]["status"] == ("ok" if _is_free(8080) else "note"), names["master"]
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state").exists()


def test_text_and_saved_json_have_same_findings(doctor, tmp_path):
    kept = doctor("--fast", "--json", "--output", str(tmp_path / "kept" / "here"))
    assert (tmp_path / "kept" / "here" / "doctor.json").read_text() == kept.stdout
    (tmp_path / "file").touch()
    refused = doctor("--fast", "--output", str(tmp_path / "file"))
    assert refused.returncode == 1
    assert refused.stderr.count("--output is") == 1
    lines = refused.stdout.splitlines()
    for status, number in json.loads(kept.stdout)["counts"].items():
        assert sum(line.startswith(f"  {status:<8} ") for line in lines) == number


def test_fast_option_imports_no_training_libraries(doctor):
    done = doctor("--fast", python=("-X", "importtime"))
    last = done.stdout.splitlines()[-1]
    assert re.match(r"\d+ ok, ", last)
    assert ("--train" in last) is (done.returncode == 0)
    assert "Libraries (" not in done.stdout
    assert "Compilers" not in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "dstrial" in imported
    assert not imported & {"torch", "deepspeed", "determined", "transformers", "numpy"}


def test_low_open_files_limit_is_problem(doctor):
    done = doctor("--fast", "--json", before="ulimit -n 64")
    assert done.returncode == 1
    assert "64 a process" in problems(done)["open files"]["what"]


def test_hanging_import_is_killed_and_reported(doctor, tmp_path):
    shadow = tmp_path / "shadow" / "torch"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text(
        "import time\n\n\ndef wait_for_a_disk():\n    time.sleep(1000)\n\n\nwait_for_a_disk()\n"
    )
    done = doctor("--json", "--deadline", "2", PYTHONPATH=shadow.parent)
    found = problems(done)
    assert done.returncode == 1
    assert f"{shadow / '__init__.py'}:5 in wait_for_a_disk" in found["import torch"]["what"]
    assert [group["name"] for group in json.loads(done.stdout)["groups"]] == GROUPS
    assert findings(done)["python"]["status"] == "ok"


def test_file_shadowing_library_is_reported(doctor, tmp_path):
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "deepspeed.py").write_text("raise ImportError('no deepspeed but mine')\n")
    assert "no deepspeed but mine" in problems(doctor("--json"))["import deepspeed"]["what"]


def test_wrong_usage_is_told(doctor):
    for arguments in (
        ["--minutes", "2"],
        ["--train", "--fast"],
        ["--require-gpus", "many"],
        ["--deadline", "-1"],
    ):
        done = doctor(*arguments)
        assert done.returncode == 2, arguments
        assert "usage:" in done.stderr


def test_report_strips_control_characters(doctor):
    text = doctor("--fast", PYTHONIOENCODING="ascii", CUDA_LAUNCH_BLOCKING="a\x1b[31m\udcffb")
    assert text.stderr == ""
    assert "\x1b" not in text.stdout
    assert "[31m" in text.stdout


def test_killed_doctor_leaves_no_child_process(tmp_path):
    shadow = tmp_path / "shadow" / "torch"
    shadow.mkdir(parents=True)
    note = tmp_path / "pid"
    (shadow / "__init__.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(note)!r}).write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dstrial.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(shadow.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    wait_for(lambda: note.exists() and note.read_text(), "the import to begin")
    process.kill()
    process.wait()
    wait_for(lambda: not pathlib.Path("/proc", note.read_text()).exists(), "the import to end")
