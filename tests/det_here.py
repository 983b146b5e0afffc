"""Run the unmodified ``det`` command in this process, which saves its start-up."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path

import determined.cli
import pytest
from determined.cli import cli

from dstrial.master.login import new_token
from dstrial.testing.master import MasterForTest


@functools.cache
def det_parser() -> argparse.ArgumentParser:
    """Return the cached parser of ``det``: building takes longer than most commands."""
    parser = cli.make_parser()
    determined.cli.add_args(parser, cli.all_args_description)
    return parser


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class DetHere:
    """Runs ``det`` commands as one user of one master."""

    address: str
    username: str
    token: str
    home: Path

    @classmethod
    def at(cls, master: MasterForTest, home: Path) -> DetHere:
        """Return a ``DetHere`` for a running master and its user ``determined``."""
        return cls(master.address, "determined", new_token(master.record), home)

    def run(self, *words: str) -> Done:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        code = 0
        variables = {
            "DET_MASTER": self.address,
            "DET_USER": self.username,
            "DET_USER_TOKEN": self.token,
            "XDG_CONFIG_HOME": str(self.home),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            parser = det_parser()
            patch.setattr(cli, "make_parser", lambda: parser)
            patch.setattr(determined.cli, "add_args", lambda *_given: None)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    cli.main(["-m", self.address, *words])
                except SystemExit as error:
                    code = error.code if isinstance(error.code, int) else 1
        out.flush()
        return Done(code, out.buffer.getvalue().decode(), err.getvalue())  # type: ignore[attr-defined]

    def ok(self, *words: str) -> str:
        """Run a command that must succeed; return its standard output."""
        done = self.run(*words)
        assert done.code == 0, f"det {' '.join(words)}: {done}"
        return done.stdout

    def refused(self, *words: str) -> str:
        """Run a command that must fail; return its standard error."""
        done = self.run(*words)
        assert done.code != 0, f"det {' '.join(words)}: {done}"
        return done.stderr


@contextlib.contextmanager
def in_directory(path: Path) -> Iterator[None]:
    """Change the working directory, which some commands write to, within a block."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
