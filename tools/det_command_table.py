"""Try every sub-command of ``det`` 0.38.1 at a live embedded master, and say what becomes of it.

Usage: ``python tools/det_command_table.py [--out FILE]``. The sub-commands are those of the command's own parser,
all the way down; one that ``det_invocations.py`` has no invocation for fails the run, and so does one that ends otherwise than
is said there. Writes a Markdown table. The master gets a free port, a temporary home and an end of its own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from det_invocations import INVOCATIONS, Invocation
from live_master import LiveMaster, Ran, det_parser, live_master, shortened, table, write_report


def sub_commands() -> list[str]:
    """Return the sub-commands of the parser that have none themselves, without ``det``; each once, by its first name."""
    return [parser.prog.removeprefix("det ") for parser in _leaves(det_parser())]


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    choices = [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]
    if not choices:
        yield parser
    for child in {id(child): child for child in choices}.values():
        yield from _leaves(child)


def invocations() -> list[Invocation]:
    """Return one invocation for every sub-command, in the order in which they are tried."""
    found = sub_commands()
    helps = [Invocation(path, "", "usage: ") for path in found if path.endswith("help")]
    chosen = [*INVOCATIONS, *helps]
    paths = [one.path for one in chosen]
    problems = [
        *(f"{path}: no invocation" for path in found if path not in paths),
        *(f"{path}: no such sub-command" for path in paths if path not in found),
        *(f"{path}: two invocations" for path in sorted({path for path in paths if paths.count(path) > 1})),
    ]
    if problems:
        raise LookupError("\n".join(problems))
    return chosen


def prepare(live: LiveMaster) -> dict[str, str]:
    """Make what the invocations name, and return it by their placeholders."""
    (live.directory / "part.yaml").write_text("description: from a template\n")
    (live.directory / "task.yaml").write_text("entrypoint: [sleep, '600']\n")
    client = live.master.client()
    ended, again, long, other = (live.create(name) for name in ("short", "short", "long", "paused"))
    gone = client.post("/api/v1/workspaces", {"name": "gone"})["workspace"]["id"]
    client.post(f"/api/v1/workspaces/{gone}/projects", {"name": "empty", "workspaceId": gone})
    for experiment_id in (ended, again):
        live.wait(experiment_id, "COMPLETED")
    first, second, third, fourth = live.checkpoints(ended)
    trial = live.trial(ended)
    return {
        "e": str(ended),
        "t": str(trial["id"]),
        "task": trial["taskId"],
        "c": first,
        "c2": second,
        "c3": third,
        "c4": fourth,
        "again": str(again),
        "long": str(long),
        "longtrial": str(live.trial(long)["id"]),
        "othertrial": str(live.trial(other)["id"]),
        "job": client.get(f"/api/v1/experiments/{long}")["experiment"]["jobId"],
        "agent": client.get("/api/v1/agents")["agents"][0]["id"],
    }


def _filled(text: str, names: dict[str, str], *, is_pattern: bool = False) -> str:
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", re.escape(value) if is_pattern else value)
    return text


def try_one(
    live: LiveMaster, one: Invocation, names: dict[str, str], tokens: dict[str, str]
) -> tuple[Ran, str]:
    """Run one invocation and return how it ended and, if that is not what was expected, what is wrong."""
    if one.after is not None:
        live.wait(int(names[one.after[0]]), one.after[1])
    words = ["-u", one.username, *one.path.split(), *shlex.split(_filled(one.words, names))]
    ran = live.det(
        words, one.username, tokens.get(one.username, ""), typed=one.typed, is_process=one.is_process
    )
    pattern = _filled(one.shows, names, is_pattern=True)
    found = re.search(pattern, f"{ran.out}\n{ran.err}")
    if found is None:
        return ran, f"shows nothing like {pattern!r}: {ran.out[-600:]}{ran.err[-600:]}"
    if one.keeps:
        names[one.keeps] = found[1]
    if (ran.code == 0) if one.code is None else (ran.code != one.code):
        return ran, f"exit code {ran.code}: {ran.out[-600:]}{ran.err[-600:]}"
    return ran, ""


def main(arguments: Sequence[str]) -> int:
    """Make the table; return 1 if anything is not as it is said to be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="the Markdown file to write; the standard output if left out"
    )
    options = parser.parse_args(arguments)
    chosen = invocations()
    rows, problems = [], []
    with tempfile.TemporaryDirectory(prefix="dstrial-det-") as name, live_master(Path(name)) as live:
        tokens = {username: live.token(username) for username in ("determined", "admin")}
        names = prepare(live)
        for one in chosen:
            started_s = time.monotonic()
            ran, problem = try_one(live, one, names, tokens)
            took_s = time.monotonic() - started_s
            if problem:
                problems.append(f"det {one.path} {_filled(one.words, names)}: {problem}")
            outcome = f"{one.outcome}: {one.reason}" if one.reason else one.outcome
            evidence = shortened(ran.evidence, name, *tokens.values())
            rows.append(
                (f"`det {one.path}`", f"**FAILS** {outcome}" if problem else outcome, str(ran.code), evidence)
            )
            if took_s > 3:
                sys.stderr.write(f"det {one.path}: {took_s:.1f} s\n")
    counts = {
        kind: sum(one.outcome == kind for one in chosen) for kind in ("works", "differs", "not offered")
    }
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    header = ("command", "outcome", "exit code", "first line")
    write_report(options.out, f"{len(rows)} sub-commands: {summary}.\n\n{table(header, sorted(rows))}")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
