"""Call every public method of Determined's SDK 0.38.1 at a live embedded master, and say what becomes of it.

Usage: ``python tools/det_sdk_table.py [--out FILE]``. The methods are those of the classes of ``determined.experimental.client``
and ``determined.common.experimental``, and the functions of the former; one that ``sdk_calls.py`` does not call fails the run,
and so does one whose result or effect is another than is said there. Writes a Markdown table.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

from determined.common import api, experimental  # noqa: E402 - it warns when it is imported
from determined.experimental import client  # noqa: E402
from live_master import DEADLINE_S, LiveMaster, live_master, shortened, surroundings, table, write_report  # noqa: E402
from sdk_calls import CALLS, Call  # noqa: E402


def public_methods() -> list[str]:
    """Return every public method and property, each by the class that has it first, and every function of the client."""
    classes = {
        value
        for module in (experimental, client)
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__.startswith(experimental.__name__)
        and not issubclass(value, enum.Enum)
    }
    found = {
        f"{one.__name__}.{name}"
        for one in classes
        for name, value in vars(one).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
    }
    functions = {
        f"client.{name}"
        for name, value in vars(client).items()
        if inspect.isfunction(value) and value.__module__ == client.__name__ and not name.startswith("_")
    }
    return sorted(found | functions)


def check_calls() -> None:
    """Check that every method is called once."""
    found, names = public_methods(), [call.name for call in CALLS]
    problems = [
        *(f"{name}: no call" for name in found if name not in names),
        *(f"{name}: no such method" for name in names if name not in found),
        *(f"{name}: two calls" for name in sorted({name for name in names if names.count(name) > 1})),
    ]
    if problems:
        raise LookupError("\n".join(problems))


def prepare(live: LiveMaster) -> dict[str, Any]:
    """Make what the calls work with, and return it by the names that they use."""
    pachyderm = {"integrations": {"pachyderm": {"dataset": {"commit": "c0ffee"}}}}
    numbers = [live.create("short", **pachyderm), live.create("long"), live.create("paused", **pachyderm)]
    live.wait(numbers[0], "COMPLETED")
    live.wait(numbers[1], "RUNNING")
    master = live.master
    determined, admin = (
        client.Determined(master.address, username, master.password(username))
        for username in ("determined", "admin")
    )
    ended, long, spare = (determined.get_experiment(number) for number in numbers)
    return {
        "live": live,
        "out": live.directory,
        "determined": determined,
        "admin": admin,
        "ended": ended,
        "long": long,
        "spare": spare,
        "trial": ended.get_trials()[0],
        "checkpoints": [determined.get_checkpoint(uuid) for uuid in live.checkpoints(ended.id)],
        "config": lambda: str(live.directory / "long.yaml"),
        "client": client,
        "Path": Path,
        "json": json,
        "fresh": _fresh,
        "state": lambda one: _fresh(one).state.name,
        "steps": lambda metrics: [one.total_batches for one in metrics],
        "ids": lambda found: [one.id for one in found],
        "event_files": lambda one: _event_files(master.state.path / "checkpoints", one.id),
        "soon": _soon,
        "refuses": _refuses,
    }


def _event_files(storage: Path, experiment_id: int) -> list[str]:
    """Walk, since a glob fails where a directory goes while it looks."""
    inside = f"/tensorboard/experiment/{experiment_id}/"
    return [
        name
        for directory, _, names in os.walk(storage)
        for name in names
        if ".tfevents" in name and inside in f"{directory}/"
    ]


def _fresh(one: Any) -> Any:
    one.reload()
    return one


def _soon(condition: Callable[[], bool]) -> bool:
    """Wait for what the master does beside its answer."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(0.05)
    return True


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except api.errors.UnauthenticatedException:
        return True
    return False


def try_one(names: dict[str, Any], call: Call) -> tuple[str, str]:
    """Make one call and return what it gave and, if that is not what was expected, what is wrong."""
    try:
        value = eval(call.perform, names)  # noqa: S307 - of sdk_calls.py
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the table
        text = f"{type(error).__name__}: {error}"
        is_expected = bool(call.error or call.outcome == "not offered") and call.error in text
        return text, "" if is_expected else text
    if call.error or call.outcome == "not offered":
        return repr(value), f"no error, but {value!r}"
    if call.keeps:
        names[call.keeps] = value
    try:
        is_so = eval(call.is_so, {**names, "v": value})  # noqa: S307 - the same
    except Exception as error:  # noqa: BLE001 - the same
        return repr(value), f"{call.is_so}: {type(error).__name__}: {error}"
    return repr(value), "" if is_so else f"gave {value!r}, and it is not so that {call.is_so}"


def main(arguments: Sequence[str]) -> int:
    """Make the table; return 1 if anything is not as it is said to be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="the Markdown file to write; the standard output if left out"
    )
    options = parser.parse_args(arguments)
    check_calls()
    rows, problems = [], []
    with (
        tempfile.TemporaryDirectory(prefix="dstrial-sdk-") as name,
        live_master(Path(name)) as live,
        surroundings({**live.master.env, "PYTHONWARNINGS": "ignore"}, live.directory),
    ):
        names = prepare(live)
        for call in CALLS:
            gave, problem = try_one(names, call)
            if problem:
                problems.append(f"{call.name}: {problem}")
            outcome = f"{call.outcome}: {call.reason}" if call.reason else call.outcome
            gave = shortened(gave, name)
            rows.append(
                (f"`{call.name}`", f"**FAILS** {outcome}" if problem else outcome, f"`{call.perform}`", gave)
            )
    kinds = ("works", "differs", "not offered")
    summary = ", ".join(f"{sum(call.outcome == kind for call in CALLS)} {kind}" for kind in kinds)
    header = ("method", "outcome", "call", "what it gave")
    write_report(options.out, f"{len(rows)} methods: {summary}.\n\n{table(header, sorted(rows))}")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
