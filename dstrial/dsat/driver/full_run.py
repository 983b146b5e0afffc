"""Train the best configuration (``--run-full-experiment``), here or on a master."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dstrial.dsat.backends import BackendFactory
from dstrial.dsat.backends.trial_spec import full_config, training_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import TrialResult
from dstrial.file_writes import replace_file
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import RUN_DIR_VARIABLE, RUNS_DIR_VARIABLE, RunDirectory, RunState
from dstrial.resume.metadata import RESUME_VARIABLE

_TRAINING_POLL_S = 0.5


def run_full(
    settings: SearchConfig,
    record: SearchRecord,
    backend: BackendFactory,
    best: TrialResult,
    signals: list[signal.Signals],
    print_line: Callable[[str], None],
) -> int:
    """Train the best configuration here, or submit it; return the exit status."""
    config = full_config(settings, best.candidate)
    path = record.path / "full_experiment.yaml"
    write_config(path, config)
    if settings.flags.local:
        return _train_here(settings, path, signals, print_line)
    number_path = record.path / "full_experiment_id.txt"
    if not number_path.exists():
        number = backend.master().create_full_experiment(config, record.search_id)
        replace_file(number_path, f"{number}\n")
    created = number_path.read_text().strip()
    print_line(f"Created experiment {created}")
    print_line(f"follow it:     det experiment logs -f {created}")
    return 0


def _train_here(
    settings: SearchConfig, path: Path, signals: list[signal.Signals], print_line: Callable[[str], None]
) -> int:
    runs = path.parent / "runs"
    if (trained := _trained(runs)) is not None:
        print_line(f"full run:      {trained}")
        return 0
    command = training_command(settings, str(path), sys.executable)
    environment = {**os.environ, RUNS_DIR_VARIABLE: str(runs), **_resume_variables(runs)}
    # The training has its own session, so that a terminal's Ctrl-C reaches it only once, from here. A second would kill it.
    process = subprocess.Popen(command, cwd=settings.context_dir, env=environment, start_new_session=True)
    num_forwarded = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_TRAINING_POLL_S)
            if (trained := _trained(runs)) is not None:
                print_line(f"full run:      {trained}")
            elif signals:
                print_line("full run:      not finished; the same command goes on with it")
                return 128 + int(signals[0])
            return code
        for number in signals[num_forwarded:]:
            process.send_signal(number)
            num_forwarded += 1


def _resume_variables(runs: Path) -> dict[str, str]:
    """Return environment variables that resume the newest full run, or an empty dict."""
    for record in sorted(runs.glob("*/*/run.json"), reverse=True):
        if newest_checkpoint(RunDirectory.open(record.parent).checkpoints_path) is not None:
            return {RUN_DIR_VARIABLE: str(record.parent), RESUME_VARIABLE: "latest"}
    return {}


def _trained(runs: Path) -> Path | None:
    found = (Path(record).parent for record in sorted(runs.glob("*/*/run.json")))
    return next(
        (path for path in found if RunDirectory.open(path).read_record().state is RunState.COMPLETED), None
    )
