"""``dstrial init``: write a small, complete project."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.errors import DstrialError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_TEMPLATES = Path(__file__).parent / "templates"
_PAGES = {
    "trial": "trials.md",
    "pipeline": "parallelism.md",
    "trainer": "huggingface.md",
    "accelerate": "accelerate.md",
}
_IGNORED = "runs/\n"  # `det` packs the context directory without what .detignore names


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "init",
        description="Write a small, complete project: experiment config, DeepSpeed config and training code.",
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", default=".", help="directory of the project (default: .)"
    )
    parser.add_argument(
        "--template",
        choices=("trial", "pipeline", "trainer", "accelerate"),
        default="trial",
        help="trial: a DeepSpeedTrial; pipeline: a DeepSpeedTrial with a PipelineModule; trainer: a script with Hugging Face's "
        "Trainer; accelerate: a script with an Accelerate loop "
        "(default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Copy a project template into a directory and return 0; never overwrite a file."""
    target = Path(args.directory)
    files = sorted(path for path in (_TEMPLATES / args.template).iterdir() if path.is_file())
    try:
        taken = [path.name for path in files if (target / path.name).exists()]
        if taken:
            another = shlex.quote(str(target / "project"))
            raise DstrialError(
                f"{target} already has {', '.join(taken)}; expected a directory without. Name another directory: "
                f"dstrial init {another} --template {args.template}."
            )
        target.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copyfile(path, target / path.name)
        if not (target / ".detignore").exists():
            (target / ".detignore").write_text(_IGNORED)
    except OSError as error:
        raise DstrialError(
            f"{target} cannot be written ({error.strerror or error}); expected a new or writable directory. "
            "Name another directory."
        ) from error
    inside = "" if target.resolve() == Path.cwd() else f"cd {shlex.quote(args.directory)} && "
    names = ", ".join(path.name for path in files)
    sys.stdout.write(
        f"wrote {names} into {target}\ntrain with: {inside}dstrial run exp.yaml .\n"
        f"explained:  docs/how-to/{_PAGES[args.template]} of dstrial's repository\n"
    )
    return 0
