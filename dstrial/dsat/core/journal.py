"""The output directory of a search, from which the same command resumes it.

``<output>/`` holds::

    search.json          fingerprint of options and configs, method, id and start time
    search.lock          locked by the process that runs the search
    events.jsonl         the journal, append-only, one event per line; replaying it restores the search
    best_ds_config.json  complete DeepSpeed config of the best configuration so far
    best_ds_metrics.json metrics of that configuration
    best_experiment.yaml experiment config with the best DeepSpeed config and hyperparameters
    trials.json          every trial of the search
    report.json          the findings as JSON; report.md has them as text
    trials/<n>/          config, output and result of trial n, if it was launched on this machine

Events are ``inputs`` (of method ``predict``), ``submitted`` (trial, candidate, handle), ``result`` (trial, outcome, seconds),
``interrupted`` (signal) and ``finished`` (reason; all processes of the search have ended). Events copied from a trial on a
master also have the field ``position``: their number in the trial's journal. Methods are deterministic: replaying results in
order requests the same trials again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrial.context_directory import OUTPUT_MARK, make_output_directory
from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.local.json_files import (
    append_json_line,
    read_json,
    read_json_lines,
    repair_json_lines,
    write_json_atomically,
)
from dstrial.local.run_directory import utc_now

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # ``OSError.errno`` of a disk without space
SEARCH_FILE = "dsat_search.json"
"""File in the context directory of a trial that runs a whole search: the flags, and the events so far."""
EVENTS_GROUP = "dsat"
"""Metric group of a search's events; ``steps_completed`` is the number of the event in the journal of the search's trial."""
BEST_NAMES = ("best_ds_config.json", "best_ds_metrics.json", "best_experiment.yaml")  # of the best trial


@dataclasses.dataclass(frozen=True, slots=True)
class SearchRecord:
    """The output directory of a search; keeps no file open between calls."""

    path: Path
    search_id: str  # 8 characters in the labels of the search's trials
    on_event: Callable[[Mapping[str, Any]], None] | None = None  # called after an event is written

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    def trial_path(self, trial_id: int) -> Path:
        return self.path / "trials" / str(trial_id)

    @classmethod
    def open(cls, output: Path, fingerprint: str, method: str, *, is_fresh: bool) -> SearchRecord:
        """Open the newest search with this fingerprint, or create a search.

        A fingerprint is a hash of the options and configs that decide what is measured. A search lies in the directory ``output``
        or in ``<output>-2``, ``<output>-3`` and so on. With ``is_fresh`` a search is always created, in the first of these
        directories that does not exist.

        Raises:
            ConfigError: ``output`` contains another search, or other files.
        """
        path, number, newest = output, 1, output
        while path.exists():
            if path.is_dir() and (read_json(path / "search.json") or {}).get("fingerprint") == fingerprint:
                newest = path
            number += 1
            path = output.with_name(f"{output.name}-{number}")
        path = path if is_fresh else newest
        document_path = path / "search.json"
        known = read_json(document_path) if path.is_dir() else None
        if known is None:
            if path.exists() and (
                not path.is_dir() or any(one.name != OUTPUT_MARK for one in path.iterdir())
            ):
                fix = "Pass another directory, or --fresh."
                problem = ConfigProblem(
                    "--output", f"{path}, which holds something else", "a directory of a search", fix
                )
                raise ConfigError([problem])
            make_output_directory(path)
            known = {
                "format": 1,
                "search_id": secrets.token_hex(4),
                "method": method,
                "fingerprint": fingerprint,
                "began": utc_now(),
            }
            write_json_atomically(document_path, known)
        elif known.get("fingerprint") != fingerprint:
            fix = "Repeat the command of that search to go on with it, or pass --fresh or another --output."
            problem = ConfigProblem(
                "--output",
                f"{path}, which holds a search ({known.get('method')}) with other settings or another config",
                "a new directory, or the same command as before",
                fix,
            )
            raise ConfigError([problem])
        return cls(path, str(known["search_id"]))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the search while the block runs.

        Raises:
            LaunchError: another process has locked the search.
        """
        descriptor = os.open(self.path / "search.lock", os.O_RDWR | os.O_CREAT, 0o666)
        os.set_inheritable(descriptor, True)  # with --run-full-experiment the process becomes a launcher
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaunchError(
                    f"{self.path} is in use by another process; expected nobody to run this search. Wait for it, or "
                    "pass --fresh."
                ) from None
            repair_json_lines(self.events_path)
            yield
        finally:
            os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.events_path)

    def append(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        event = {"event": kind, "time": utc_now(), **fields}
        append_json_line(self.events_path, event)
        if self.on_event is not None:
            self.on_event(event)
        return event

    def restore(self, event: Mapping[str, Any]) -> None:
        """Append an event that another process has recorded; ``on_event`` is not called."""
        append_json_line(self.events_path, event)


@dataclasses.dataclass(frozen=True, slots=True)
class SearchStatus:
    """How a process that ran a search ended: finished, failed, or stopped by a signal."""

    reason: str
    is_finished: bool  # if false, the same command resumes the search
    is_failure: bool = False  # nothing could be measured
    stopped_by: signal.Signals | None = None


def is_final(event: Mapping[str, Any], budget_s: float | None) -> bool:
    """Return whether a ``finished`` event ends the search for good.

    False if the search ended because its time budget was spent, and the new ``budget_s`` (seconds; None: no limit) is larger.
    """
    spent_s = event.get("budget_s")
    return spent_s is None or (budget_s is not None and budget_s <= spent_s)
