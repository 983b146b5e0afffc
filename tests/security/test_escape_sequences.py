"""Control sequences in logs and names are escaped before they reach a terminal."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from det_here import DetHere

from dstrial.testing.master import MasterForTest, master_for_test

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "master"))
from submitting import submit, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# Clears the screen, sets the title, injects the cursor position as input, adds a link, a C1 code and reversed text.
ATTACK = "\x1b[2J\x1b]0;owned\x07\x1b[6n\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\ \x9b31m \u202egnp.exe"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TRAIN = f"""
import sys
import determined as det

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    sys.stdout.reconfigure(encoding="utf-8")
    print("out", {ATTACK!r})
    print("err", {ATTACK!r}, file=sys.stderr)
    print("10%\\r20%\\rdone")
    core.train.set_status({ATTACK!r})
    core.train.report_validation_metrics(1, {{"score": 1.0}})
raise RuntimeError({ATTACK!r})
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("escapes")) as one:
        given = {
            "name": f"name {ATTACK}",
            "description": f"description {ATTACK}",
            "labels": [f"label {ATTACK}"],
            "entrypoint": "python3 train.py",
            "hyperparameters": {"x": ATTACK},
            "searcher": {"name": "single", "metric": "score"},
            "max_restarts": 0,
        }
        wait_until(one, submit(one, given, TRAIN), "ERROR")
        client = one.client()
        client.post("/api/v1/workspaces", {"name": f"space {ATTACK}"})
        client.post(
            "/api/v1/models",
            {"name": "model " + ATTACK.replace("/", ""), "description": ATTACK, "labels": [ATTACK]},
        )
        yield one


def test_cli_output_escapes_control_sequences(master: MasterForTest, tmp_path: Path) -> None:
    det, texts = DetHere.at(master, tmp_path), {}
    for words in (
        "trial logs 1",
        "experiment logs 1",
        "experiment list",
        "experiment describe 1",
        "experiment list-trials 1",
        "experiment config 1",
        "trial describe 1",
        "task list",
        "job list",
        "workspace list",
        "model list",
        "master logs",
    ):
        texts[words] = det.ok(*words.split())
    for words in ("status", "logs"):
        texts[f"dstrial {words}"] = master.dstrial(words).stdout

    # In a config, YAML escapes control characters but keeps marks of text direction.
    texts["experiment config 1"] = texts["experiment config 1"].replace("\u202e", "")
    assert {words: OBEYED.findall(text) for words, text in texts.items() if OBEYED.search(text)} == {}
    log = texts["trial logs 1"]
    assert "out \\x1b[2J\\x1b]0;owned\\x07\\x1b[6n" in log
    assert "err \\x1b[2J" in log
    assert "\\x9b31m \\u202egnp.exe" in log
    assert [line.partition("|| ")[2] for line in log.splitlines() if "%" in line] == ["10%", "20%"]
    assert "name \\x1b[2J" in texts["experiment list"]
    assert "space \\x1b[2J" in texts["workspace list"]


def test_cli_error_message_escapes_control_sequences(master: MasterForTest) -> None:
    done = master.det("model", "describe", f"no {ATTACK}")

    assert done.returncode != 0
    assert not OBEYED.search(done.stderr.replace(ATTACK, ""))


def test_database_keeps_raw_log_output(master: MasterForTest) -> None:
    with contextlib.closing(sqlite3.connect(master.state.database_path)) as connection:
        lines = [row[0] for row in connection.execute("SELECT log FROM logs WHERE source = 'task'")]

    assert f"out {ATTACK}\n" in lines


def test_master_log_resists_line_injection(master: MasterForTest) -> None:
    forged = "2026-01-01T00:00:00.000 CRITICAL dstrial.master: forged"
    client = master.client()
    for name in (f"x\n{forged}", f"x\r{forged}\x1b[2J"):
        with contextlib.suppress(Exception):
            client.post("/api/v1/auth/login", {"username": name, "password": "y"})
        with contextlib.suppress(Exception):
            client.post("/api/v1/templates/" + name.replace("\n", "%0A").replace(" ", "%20"), {"config": {}})
        submit(master, {"name": name, "entrypoint": ["false"], "labels": [name],
                        "searcher": {"name": "single", "metric": "score"}})  # fmt: skip

    text = master.state.log_path.read_bytes().decode()

    assert [line for line in re.split(r"[\r\n]", text) if line.startswith(forged[:24])] == []
    assert not OBEYED.search(text)


CORE_API = """
import os, sys
sys.stdout.reconfigure(encoding="utf-8")
print("of rank", ATTACK)
raise RuntimeError(ATTACK)
"""


def test_run_command_escapes_control_sequences(master: MasterForTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CORE_API.replace("ATTACK", repr(ATTACK)))
    (tmp_path / "exp.yaml").write_text(
        "name: run\nentrypoint: python3 -m dstrial.launch train.py\n"
        "searcher: {name: single, metric: score, max_length: {batches: 1}}\nmax_restarts: 0\n"
    )

    done = master.dstrial(
        "run", str(tmp_path / "exp.yaml"), str(tmp_path), "--runs-dir", str(tmp_path / "runs"), deadline_s=200
    )

    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "of rank \\x1b[2J" in text, text
    assert not OBEYED.search(text), OBEYED.findall(text)
