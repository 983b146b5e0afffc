"""Record ``--help`` texts, and ``dstrial check`` of the shipped experiments."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from normalization import normalized
from record import ROOT

PROGRAMS = (
    "dstrial.cli",
    "dstrial.dsat",
    *(f"dstrial.dsat {method}" for method in ("predict", "asha", "binary", "random", "plan")),
    "dstrial.launch",
    "dstrial.stand_ins.dsat",
    "dstrial.stand_ins.launch_deepspeed",
)
"""Programs for ``python -m`` with options, without the ``dstrial`` subcommands."""

_IN_JSON = (
    "digits",
    "hf_clm",
)  # recorded as JSON; each has 500 lines, with the origin of every DeepSpeed default


def help_texts(_scratch: Path) -> dict[str, str]:
    """Record ``--help`` of the programs behind ``python -m``."""
    sections = [
        _section(f"python -m {name} --help", lambda name=name: _run_module(name)) for name in PROGRAMS
    ]
    return {"help.txt": "\n".join(sections)}


def checks(_scratch: Path) -> dict[str, str]:
    """Record ``dstrial check`` and ``check --explain`` of every shipped experiment config, as text and as JSON."""
    from dstrial.cli.app import main

    texts = []
    for config in sorted((ROOT / "experiment_configs").glob("*.yaml")):
        names = [path.name for path in (ROOT / "model_defs").iterdir() if config.stem.startswith(path.name)]
        place = [f"experiment_configs/{config.name}", f"model_defs/{max(names, key=len)}"]
        for options in ([], ["--explain"], *([["--explain", "--json"]] if config.stem in _IN_JSON else [])):
            words = ["check", *place, *options]
            texts.append(_section(f"dstrial {' '.join(words)}", lambda words=words: main(words)))
    # Sizes change with every edit of a model definition.
    text = re.sub(
        r'^(context directory: ).*$|("bytes": )\d+', r"\1\2<size>", "\n".join(texts), flags=re.MULTILINE
    )
    return {"check.txt": normalized(text, {str(ROOT): "repository"})}


def _section(title: str, run: Callable[[], object]) -> str:
    """Run a function; return its output, and its exit status unless that is 0."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _columns(100):
        try:
            status = run()
        except SystemExit as ended:
            status = ended.code
    said = f"--- stderr\n{err.getvalue()}" if err.getvalue() else ""
    ended_with = f"--- exit status {status}\n" if status else ""
    return f"$ {title}\n{out.getvalue()}{said}{ended_with}"


def _run_module(program: str) -> None:
    name, *words = program.split()
    with mock.patch.object(sys, "argv", [name, *words, "--help"]), warnings.catch_warnings():
        # runpy warns if another test has imported the module.
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
        yield
