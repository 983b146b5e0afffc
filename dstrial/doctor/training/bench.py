"""What a check works with: directories, time, facts, dstrial's public functions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.doctor.training.check import CheckFailedError, Facts, facts_path, read_facts

PROGRAMS = "dstrial.doctor.training.programs"

ACCELERATOR_VARIABLE = "TRAINING_CHECK_ACCELERATOR"
"""What the check ``environment`` has found, so that others need not import torch to know."""

_SHOWN_CHARACTERS = 6000
_MODEL_DEF = "from dstrial.doctor.training.programs.trial import TextTrial  # noqa: F401\n"
_LAUNCH_MARGIN_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchResult:
    """How ranks ended that a check has started.

    Attributes:
        exit_code: of the launcher.
        output: what it and the ranks printed.
        facts: what rank 0 has noted.
    """

    exit_code: int
    output: str
    facts: Mapping[str, Any]
    seconds: float

    @property
    def end(self) -> str:
        """The end of the output."""
        return self.output[-_SHOWN_CHARACTERS:]


class Bench:
    """One check's place.

    Args:
        directory: where its output and facts are kept.
        scratch: where it may write; removed when it has ended.
        ends_at_s: when it should have ended, of ``time.monotonic``.
    """

    def __init__(self, directory: Path, scratch: Path, ends_at_s: float) -> None:
        self.directory = directory
        self.scratch = scratch
        self._ends_at_s = ends_at_s
        self._facts = Facts(facts_path(directory, "check"))

    @property
    def left_s(self) -> float:
        """Seconds until this check is ended."""
        return max(self._ends_at_s - time.monotonic(), 1.0)

    def note(self, **values: Any) -> None:
        """Keep what was found: name -> JSON value."""
        self._facts.note(**values)

    @property
    def is_cpu(self) -> bool:
        """Whether DeepSpeed will train on the CPU here."""
        known = os.environ.get(ACCELERATOR_VARIABLE)
        if known:
            return known == "cpu"
        from dstrial.ranks.process_group import has_accelerator

        return not has_accelerator()

    @property
    def has_cuda(self) -> bool:
        """Whether there is a CUDA device; makes no context."""
        if self.is_cpu:
            return False
        import torch

        return torch.cuda.is_available() and torch.version.cuda is not None

    @property
    def num_slots(self) -> int:
        """Ranks of a check that wants several: 1 or 2 accelerators, or 2 CPU ranks."""
        if self.is_cpu:
            return 2
        import torch

        return max(min(int(torch.accelerator.device_count()), 2), 1)

    def launch(
        self,
        program: str,
        *arguments: str,
        slots: int = 1,
        env: Mapping[str, str] | None = None,
        facts_of: str = "",
        may_fail: bool = False,
    ) -> LaunchResult:
        """Run one of ``programs`` on ranks, through ``python -m dstrial.launch``.

        Args:
            program: module of ``programs``.
            arguments: for it, after ``--facts FILE``.
            slots: ranks.
            env: further variables.
            facts_of: name under which its facts are kept; that of the program if empty.
            may_fail: whether a failure is for the caller to judge.

        Raises:
            CheckFailedError: it failed, or did not end in time.
        """
        name = facts_of or program
        facts = facts_path(self.directory, name)
        ended = self.run(
            [
                sys.executable,
                "-m",
                "dstrial.launch",
                "--slots",
                str(slots),
                "-m",
                f"{PROGRAMS}.{program}",
                "--facts",
                str(facts),
                *arguments,
            ],
            env=env,
        )
        launched = dataclasses.replace(ended, facts=read_facts(facts))
        if launched.exit_code != 0 and not may_fail:
            raise CheckFailedError(
                f"{name} on {slots} rank(s) ended with exit code {launched.exit_code}: {last_line(launched.output)}",
                "Read the traceback of the rank that failed first, below.",
                launched.end,
            )
        return launched

    def run(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> LaunchResult:
        """Run a command in the scratch directory; its output is this check's, too.

        Raises:
            CheckFailedError: it did not end in time.
        """
        began_s = time.monotonic()
        limit_s = max(self.left_s - _LAUNCH_MARGIN_S, 1.0)
        variables = {**os.environ, "DSTRIAL_RUNS_DIR": str(self.scratch / "runs"), **(env or {})}
        if self.is_cpu:
            # Threads of torch that wait for each other on busy cores take many times as long.
            variables.setdefault("OMP_NUM_THREADS", "1")
        print(f"$ {' '.join(command)}", flush=True)  # noqa: T201  # the check's log
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.scratch,
            env=variables,
        )
        lines: list[str] = []
        with _ended(process):
            # Read to the end in this thread: a check that hangs is ended from outside, with all its processes.
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                sys.stdout.write(line)
                sys.stdout.flush()
            process.wait(limit_s)
        return LaunchResult(process.returncode, "".join(lines), {}, time.monotonic() - began_s)

    @contextlib.contextmanager
    def master(self, *, slots: int) -> Iterator[Mapping[str, str]]:
        """Run an embedded master of this check's own while the block lasts.

        Yields:
            Variables with which ``dstrial`` and ``det`` find it.

        Raises:
            CheckFailedError: it does not start.
        """
        state = self.scratch / "state"
        env = {
            "DSTRIAL_STATE_DIR": str(state),
            "XDG_CONFIG_HOME": str(self.scratch / "config"),
            **({"DS_ACCELERATOR": "cpu"} if self.is_cpu else {}),
        }
        up = self.dstrial("up", "--slots", str(slots), "--port", "0", env=env)
        if up.exit_code != 0:
            raise CheckFailedError(
                f"`dstrial up` ended with exit code {up.exit_code}: {last_line(up.output)}",
                "Follow the message below.",
                up.end,
            )
        if not self.is_cpu and re.search(r"^slots: +\d+ cpu", up.output, re.MULTILINE):
            raise CheckFailedError(
                "the master offers CPU slots on a machine on which torch sees an accelerator",
                "See that the driver's files (/dev/nvidiactl or /dev/kfd) and nvidia-ml-py are there.",
                up.end,
            )
        address = next(
            (word.partition("=")[2] for word in up.output.split() if word.startswith("DET_MASTER=")), ""
        )
        try:
            yield {**env, "DET_MASTER": address}
        finally:
            self.dstrial("down", "--now", env=env)

    def write_experiment(self, *, slots: int, stage: int, code: str = "", **fields: Any) -> Path:
        """Write a short trial's config into a context directory of its own; its path.

        Args:
            slots: ranks.
            stage: of ZeRO.
            code: that the trial's module begins with.
            fields: further ones of the config.
        """
        from dstrial.doctor.training.programs.program import deepspeed_config

        context = Path(tempfile.mkdtemp(prefix="definition-", dir=self.scratch))
        (context / "model_def.py").write_text(code + _MODEL_DEF, encoding="utf-8")
        config = {
            "name": "doctor",
            "entrypoint": "python3 -m dstrial.launch --trial model_def:TextTrial",
            "hyperparameters": {"deepspeed_config": deepspeed_config(stage)},
            "searcher": {
                "name": "single",
                "metric": "validation_loss",
                "smaller_is_better": True,
                "max_length": {"batches": 20},
            },
            "resources": {"slots_per_trial": slots},
            "scheduling_unit": 5,
            "min_validation_period": {"batches": 10},
            "max_restarts": 0,
            "reproducibility": {"experiment_seed": 3},
            **fields,
        }
        path = context / "experiment.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(config, indent=1), encoding="utf-8")
        return path

    def dstrial(self, *arguments: str, env: Mapping[str, str] | None = None) -> LaunchResult:
        """Run a ``dstrial`` command; its end is not judged."""
        return self.run([sys.executable, "-m", "dstrial.cli", *arguments], env=env)

    def det(self, *arguments: str, env: Mapping[str, str]) -> Any:
        """Run a ``det`` command that prints JSON and return its value.

        Raises:
            CheckFailedError: it failed.
        """
        ended = self.run([sys.executable, "-m", "determined.cli", *arguments], env=env)
        found = _json_in(ended.output)
        if found is None:
            raise CheckFailedError(
                f"`det {' '.join(arguments)}` ended with exit code {ended.exit_code} and printed no JSON",
                "Read what it printed, below.",
                ended.end,
            )
        return found

    def reports(self, trial_id: int, *groups: str, env: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
        """Return what a trial has reported in each group, as Determined's client reads it.

        Raises:
            CheckFailedError: it cannot be read.
        """
        ended = self.run([sys.executable, "-m", f"{PROGRAMS}.reported", str(trial_id), *groups], env=env)
        found = _json_in(ended.output)
        if not isinstance(found, dict):
            raise CheckFailedError(
                f"Determined's client ended with exit code {ended.exit_code} and read no metrics",
                "Read what it printed, below.",
                ended.end,
            )
        return found


def _json_in(output: str) -> Any:
    """Return the JSON from the line that begins it to the end; None without any."""
    lines = output.splitlines(keepends=True)
    for idx, line in enumerate(lines):
        if line.startswith(("[", "{")):
            with contextlib.suppress(ValueError):
                return json.loads("".join(lines[idx:]))
    return None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process where the block is left early."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def last_line(output: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it printed nothing"
