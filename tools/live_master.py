"""A master of one's own with things in it, and the unmodified ``det`` command in this process: for the two tables."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import determined.cli
import yaml
from determined.cli import cli

from dstrial.testing.master import MasterForTest, master_for_test

DEADLINE_S = 120.0
TRAIN = """
import sys, time
import determined as det

hparams = det.get_cluster_info().trial.hparams
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step in range(1, hparams["steps"] + 1):
        time.sleep(hparams["sleep"])
        print("batch", step)
        core.train.report_training_metrics(step, {"loss": 1 / step})
        core.train.report_validation_metrics(step, {"score": step})
        if not hparams["sleep"]:
            with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "weights.txt").write_text(str(step))
        if core.preempt.should_preempt():
            sys.exit(0)
    events = core.train.get_tensorboard_path()
    events.mkdir(parents=True, exist_ok=True)
    (events / "events.out.tfevents.1").write_bytes(b"")
    core.train.upload_tensorboard_files()
"""


@functools.cache
def det_parser() -> argparse.ArgumentParser:
    """Return the parser of ``det``, which takes longer to build than most commands take."""
    parser = cli.make_parser()
    parser.prog = "det"
    determined.cli.add_args(parser, cli.all_args_description)
    return parser


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def evidence(self) -> str:
        """The first line that it has printed, of the errors if it has failed."""
        text = (self.err if self.code else self.out) or self.out or self.err
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
        return next((line for line in lines if line), "")


@dataclasses.dataclass(frozen=True, slots=True)
class LiveMaster:
    """A master in a temporary directory, with a temporary home."""

    master: MasterForTest
    directory: Path

    def token(self, username: str) -> str:
        return self.master.client(username).token

    def det(
        self, words: Sequence[str], username: str, token: str, *, typed: str = "", is_process: bool = False
    ) -> Ran:
        """Run a ``det`` command in the directory; in a process of its own if it reads passwords or writes past ``sys.stdout``."""
        variables = {
            **self.master.env,
            "DET_USER": username,
            "DET_USER_TOKEN": token,
            "PYTHONWARNINGS": "ignore",
        }
        if is_process:
            done = subprocess.run(
                [sys.executable, "-m", "determined.cli", *words],
                env=variables, cwd=self.directory, input=typed, start_new_session=True, capture_output=True, text=True,
                check=False, timeout=DEADLINE_S,
            )  # fmt: skip
            return Ran(done.returncode, done.stdout, done.stderr)
        out, err, code = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO(), 0
        with (
            surroundings(variables, self.directory, typed),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                _main(["-m", self.master.address, *words])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        out.flush()
        return Ran(code, out.buffer.getvalue().decode(errors="replace"), err.getvalue())  # type: ignore[attr-defined]

    def create(self, name: str = "short", **changes: Any) -> int:
        given = {**yaml.safe_load((self.directory / f"{name}.yaml").read_text()), **changes}
        content = base64.b64encode(TRAIN.encode()).decode()
        file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
        is_active = name != "paused"
        message = {"activate": is_active, "config": yaml.safe_dump(given), "modelDefinition": [file]}
        return int(self.master.client().post("/api/v1/experiments", message)["experiment"]["id"])

    def wait(self, experiment_id: int, *states: str) -> None:
        give_up_at_s, client = time.monotonic() + DEADLINE_S, self.master.client()
        while True:
            state = client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"]
            if state.removeprefix("STATE_") in states:
                return
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"experiment {experiment_id} is {state}; expected {states}")
            time.sleep(0.05)

    def trial(self, experiment_id: int) -> dict[str, Any]:
        found: dict[str, Any] = self.master.client().get(f"/api/v1/experiments/{experiment_id}/trials")[
            "trials"
        ][0]
        return found

    def checkpoints(self, experiment_id: int) -> list[str]:
        found = self.master.client().get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
        by_steps = sorted(found, key=lambda one: one["metadata"]["steps_completed"], reverse=True)
        return [str(one["uuid"]) for one in by_steps]


def _main(words: Sequence[str]) -> None:
    """Run ``det`` with the parser that has been built."""
    parser, make_parser, add_args = det_parser(), cli.make_parser, determined.cli.add_args
    cli.make_parser, determined.cli.add_args = (lambda: parser), (lambda *_given: None)
    try:
        cli.main(list(words))
    finally:
        cli.make_parser, determined.cli.add_args = make_parser, add_args


@contextlib.contextmanager
def surroundings(variables: Mapping[str, str], directory: Path, typed: str = "") -> Iterator[None]:
    """Work with these variables, in this directory, with this input, while the block lasts."""
    before, cwd, stdin, argv = dict(os.environ), Path.cwd(), sys.stdin, sys.argv
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.stdin, sys.argv = io.StringIO(typed), ["det"]
    try:
        yield
    finally:
        sys.stdin, sys.argv = stdin, argv
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def live_master(directory: Path) -> Iterator[LiveMaster]:
    """Run a master with two slots while the block lasts."""
    (directory / "home").mkdir()
    work = directory / "work"
    (work / "context").mkdir(parents=True)
    (work / "context" / "train.py").write_text(TRAIN)
    for name, hparams in (("short", (4, 0.0)), ("long", (6000, 0.1)), ("paused", (4, 0.0))):
        given = {
            "name": name,
            "entrypoint": "python3 train.py",
            "hyperparameters": {"steps": hparams[0], "sleep": hparams[1]},
            "searcher": {"name": "single", "metric": "score", "smaller_is_better": False},
            "max_restarts": 0,
            "resources": {"slots_per_trial": 0 if name == "long" else 1},
            "checkpoint_storage": {"save_trial_latest": 4},
        }
        (work / f"{name}.yaml").write_text(yaml.safe_dump(given))
    with master_for_test(directory, env={"HOME": str(directory / "home"), "BROWSER": "true"}) as master:
        yield LiveMaster(master, work)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)]) + "\n"


def shortened(text: str, *replaced: str) -> str:
    """Return a line without what differs from run to run: temporary paths, ports, times, tokens and uuids."""
    for one in replaced:
        text = text.replace(one, "…")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "UUID", text)
    text = re.sub(r"<[\w.]*?(\w+) object at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+0000)?", "TIME", text)
    text = re.sub(r"(localhost|127\.0\.0\.1):\d+", r"\1:PORT", text)
    return text if len(text) <= 110 else text[:109] + "…"


def write_report(path: Path | None, text: str) -> None:
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def dumped(value: Any) -> str:
    return json.dumps(value, default=str)
