"""Run training checks one after another, each in its own process; show progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.status import Status as Spinner

from dstrial.doctor.training.bench import ACCELERATOR_VARIABLE
from dstrial.doctor.training.check import Check, Result, Status, all_facts, read_facts
from dstrial.doctor.training.processes import Ended, run_marked
from dstrial.doctor.training.report import Record

ANSWER_NAME = "answer.json"
OUTPUT_NAME = "output.log"

_MIN_S = 3.0
# CPU ranks share their cores with everything else that runs on the machine.
_CPU_FACTOR = 2.0
_SHOWN_LINES = 30
_SHOWN_CHARACTERS = 6000
_STACK_START = re.compile(r"^(Current thread|Thread) 0x")


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressCallbacks:
    """What is told of a run while it goes on.

    Attributes:
        begins: a check begins: number, count, check, seconds that it may take.
        goes_on: called every moment while one runs.
        ends: a check has ended, or will not begin.
    """

    begins: Callable[[int, int, Check, float], None]
    goes_on: Callable[[], None]
    ends: Callable[[int, int, Result], None]


def run_checks(
    checks: Sequence[Check], record: Record, *, minutes: float, told: ProgressCallbacks
) -> list[Result]:
    """Run ``checks``, most telling first, until all have ended or the minutes are up.

    Each result is in ``record`` as soon as it is there.
    """
    ends_at_s = time.monotonic() + 60.0 * minutes
    results: list[Result] = []
    known: dict[str, str] = {}
    for idx, planned in enumerate(checks):
        check = planned
        if known.get(ACCELERATOR_VARIABLE) == "cpu":
            check = dataclasses.replace(planned, deadline_s=_CPU_FACTOR * planned.deadline_s)
        left_s = ends_at_s - time.monotonic()
        if left_s < max(check.needs_s, _MIN_S):
            result = _not_reached(check, left_s, minutes)
        else:
            allowed_s = min(check.deadline_s, left_s)
            told.begins(idx, len(checks), check, allowed_s)
            record.begin(check)
            result = run_check(
                check,
                record.directory / "checks" / check.name,
                allowed_s=allowed_s,
                env=known,
                on_wait=told.goes_on,
            )
            if check.name == "environment" and result.facts.get("accelerator"):
                known = {ACCELERATOR_VARIABLE: str(result.facts["accelerator"])}
        results.append(result)
        record.add(result)
        told.ends(idx, len(checks), result)
    record.finish()
    return results


def run_check(
    check: Check,
    directory: Path,
    *,
    allowed_s: float,
    env: Mapping[str, str] | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Result:
    """Run one check and judge how it ended.

    Args:
        check: the check.
        directory: where its output and facts are kept; made here.
        allowed_s: seconds until it is ended, its deadline or what the minutes leave of it.
        env: further variables.
        on_wait: called again and again meanwhile.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Short: sockets lie below it, whose paths the kernel limits to 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="doctor-"))
    command = [sys.executable, "-m", "dstrial.doctor.training.child", check.module, str(directory)]
    command += [str(scratch), str(max(allowed_s - 2.0, 1.0))]
    try:
        ended = run_marked(
            command,
            output=directory / OUTPUT_NAME,
            cwd=scratch,
            env={**check_environment(os.environ), **(env or {})},
            deadline_s=allowed_s,
            on_wait=on_wait,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    facts = all_facts(directory)
    doing = str(facts.pop("doing", ""))
    answer = read_facts(directory / ANSWER_NAME)
    result = judge(check, ended, answer, allowed_s, _tail(directory / OUTPUT_NAME), doing)
    return dataclasses.replace(result, facts=facts)


def judge(
    check: Check, ended: Ended, answer: Mapping[str, Any], allowed_s: float, output: str, doing: str = ""
) -> Result:
    """Say how a check ended, from how its process did. Pure.

    ``answer`` is empty without an answer, or with one that is none; ``allowed_s`` is how long it had, seconds; ``output`` is the
    end of its output; ``doing`` is what it was at when it ended, empty if unknown.
    """
    at = f", at {doing}" if doing else ""
    made = Result(
        check.name,
        check.title,
        Status.FAILED,
        "",
        seconds=ended.seconds,
        deadline_s=allowed_s,
        output=output,
    )
    status = {status.value: status for status in Status}.get(str(answer.get("status")))
    if status is not None and isinstance(answer.get("summary"), str):
        is_failed = status is Status.FAILED
        more = str(answer.get("output") or "")
        return dataclasses.replace(
            made,
            status=status,
            summary=str(answer["summary"]),
            advice=str(answer.get("advice") or ""),
            not_shown=str(answer.get("not_shown") or ""),
            output=(more or output) if is_failed else "",
        )
    if ended.is_late and allowed_s < check.deadline_s:
        return dataclasses.replace(
            made,
            status=Status.NOT_REACHED,
            summary=f"cut off after {ended.seconds:.0f} s{at}, when the minutes were up",
            advice=f"Pass more --minutes, or --only {check.name}.",
        )
    if ended.is_late:
        has_stacks = any(_STACK_START.match(line) for line in output.splitlines())
        return dataclasses.replace(
            made,
            summary=f"it did not end within its deadline of {check.deadline_s:.0f} s and was ended{at}",
            advice="Read where its processes were, below."
            if has_stacks
            else "Read the end of its output, below.",
        )
    how = f"exit code {ended.exit_code}"
    if ended.exit_code < 0:
        how = f"signal {_signal_name(-ended.exit_code)}"
    return dataclasses.replace(
        made,
        summary=f"its process ended with {how} and without an answer{at}",
        advice="Read the end of its output, below.",
    )


def _not_reached(check: Check, left_s: float, minutes: float) -> Result:
    return Result(
        check.name,
        check.title,
        Status.NOT_REACHED,
        f"{max(left_s, 0):.0f} s of {minutes:g} minutes were left; it needs {check.needs_s:.0f} s",
        advice=f"Pass more --minutes, or --only {check.name}.",
        deadline_s=check.deadline_s,
    )


def check_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this environment for a check, without what marks a rank or a run.

    ``PYTHONPATH`` begins with where this dstrial lies and has no relative paths, since checks run in other directories.
    """
    ranks = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {
        name: value
        for name, value in environ.items()
        if name not in ranks and not name.startswith(("DSTRIAL_", "DET_", "PYTEST_"))
    }
    own = str(Path(__file__).resolve().parents[3])
    given = [str(Path(word).absolute()) for word in kept.get("PYTHONPATH", "").split(os.pathsep) if word]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([own, *given])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _tail(path: Path) -> str:
    try:
        text = path.read_bytes()[-4 * _SHOWN_CHARACTERS :].decode(errors="replace")
    except OSError:
        return ""
    # Progress bars and terminals' codes have no place in a report.
    text = "".join(letter for letter in text.replace("\r", "\n") if letter == "\n" or letter.isprintable())
    return "\n".join(text.splitlines()[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]


@contextlib.contextmanager
def shown(stream: TextIO | None = None) -> Iterator[ProgressCallbacks]:
    """Yield what shows a run on a stream, stderr if None."""
    console = Console(file=stream or sys.stderr, highlight=False, markup=False, soft_wrap=True)
    spinner: Spinner | None = Spinner("", console=console) if console.is_terminal else None
    began_s, text = 0.0, ""

    def begins(idx: int, count: int, check: Check, allowed_s: float) -> None:
        nonlocal began_s, text
        began_s = time.monotonic()
        text = f"[{idx + 1}/{count}] {check.name}: {check.title}"
        if spinner is None:
            console.print(f"{text} (at most {allowed_s:.0f} s)")
        else:
            spinner.update(text)
            spinner.start()

    def goes_on() -> None:
        if spinner is not None:
            spinner.update(f"{text} {time.monotonic() - began_s:.0f} s")

    def ends(idx: int, count: int, result: Result) -> None:
        if spinner is not None:
            spinner.stop()
        console.print(
            f"[{idx + 1}/{count}] {result.name}: {result.status.value}, {result.seconds:.1f} s: {result.summary}"
        )
        if result.not_shown:
            console.print(f"      not shown here: {result.not_shown}")
        if result.advice:
            console.print(f"      {result.advice}")

    try:
        yield ProgressCallbacks(begins, goes_on, ends)
    finally:
        if spinner is not None:
            spinner.stop()
