"""``dstrial convert``: convert another tool's config to an experiment config."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.cli.experiment_arguments import FOREIGN_LAUNCHERS
from dstrial.config.diagnostics import render
from dstrial.config.documents import read_json, read_yaml
from dstrial.config.experiment_config.config import load_experiment
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.integrations.accelerate.convert import (
    JSON_NAME,
    MARK,
    YAML_NAME,
    Choices,
    Conversion,
    convert,
    experiment_yaml,
    is_deepspeed,
)
from dstrial.launch.slots import slots_argument

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "convert",
        description="Convert another tool's config to an experiment config and a DeepSpeed JSON. Print settings "
        "that are not converted.",
    )
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    accelerate = tools.add_parser(
        "accelerate",
        help="convert a file that `accelerate config` wrote",
        description=f"Convert a file that `accelerate config` wrote to {JSON_NAME} and {YAML_NAME}. The new files mark settings "
        "that you must add (script, micro batch, optimizer, searcher). "
        "Accelerate need not be installed.",
    )
    accelerate.add_argument("config", metavar="default_config.yaml", type=Path, help="the Accelerate config")
    accelerate.add_argument(
        "--entrypoint",
        metavar="SCRIPT",
        help='training script in DIR with its arguments, as one quoted word: "train.py --epochs 3"',
    )
    accelerate.add_argument(
        "--micro-batch", type=slots_argument, metavar="N", help="records of one forward pass on one rank"
    )
    accelerate.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        default=Path(),
        help="directory of the training script, to which the new files are written (default: .)",
    )
    accelerate.add_argument("--force", action="store_true", help="overwrite existing files")


def main(args: argparse.Namespace) -> int:
    label = str(args.config)
    config = read_yaml(args.config, label).value
    if not isinstance(config, Mapping):
        fix = "Name a file that `accelerate config` wrote."
        raise ConfigError([ConfigProblem(label, render(config), "a mapping", fix)])
    choices = Choices(args.entrypoint, args.micro_batch, args.config.resolve().stem)
    conversion = convert(config, choices, label=label, deepspeed_file=_deepspeed_file(args.config, config))
    _require_script(choices.entrypoint)
    targets = {
        args.output / JSON_NAME: json.dumps(conversion.deepspeed, indent=2, ensure_ascii=False) + "\n",
        args.output / YAML_NAME: experiment_yaml(conversion, args.config.name),
    }
    _write(targets, force=args.force)
    sys.stdout.write("".join(f"note: not converted: {line}\n" for line in conversion.left))
    return _check(args.output / YAML_NAME, args.output, conversion)


def _deepspeed_file(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of the DeepSpeed file that an Accelerate config names.

    The result is None if the config names no file. ConfigError is raised if the file does not exist or has no JSON object.
    """
    section = config.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if named in (None, "", "none") or not is_deepspeed(config):
        return None
    found = next((place for place in (Path(str(named)), path.parent / str(named)) if place.is_file()), None)
    where = f"{path}: deepspeed_config.deepspeed_config_file"
    if found is None:
        got, expected = f"{named!r}, which does not exist", "an existing JSON file"
        fix = f"Run the command where {named} lies, or correct the path."
        raise ConfigError([ConfigProblem(where, got, expected, fix)])
    value = read_json(found, str(found)).value
    if not isinstance(value, dict):
        got = f"a file with {render(value)}"
        raise ConfigError([ConfigProblem(where, got, "a JSON object", "Put the settings between braces.")])
    return value


def _require_script(entrypoint: str | None) -> None:
    """Raise ``ConfigError`` if the entrypoint begins with another launcher."""
    words = shlex.split(entrypoint or "")
    if words and Path(words[0]).name in FOREIGN_LAUNCHERS:
        fix = f"Leave {words[0]!r} and its options away: python3 -m dstrial.launch takes its place."
        raise ConfigError(
            [ConfigProblem("--entrypoint", repr(entrypoint), "the script and its own arguments", fix)]
        )


def _write(targets: Mapping[Path, str], *, force: bool) -> None:
    existing = [path for path in targets if path.exists()]
    if existing and not force:
        fix = "Name another directory with -o, or pass --force to replace them."
        raise ConfigError([ConfigProblem(str(path), "there already", "a new file", fix) for path in existing])
    for path, text in targets.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            got, fix = f"not writable ({error.strerror})", "Name another one with -o."
            raise ConfigError([ConfigProblem(str(path), got, "a writable directory", fix)]) from error


def _check(path: Path, context_dir: Path, conversion: Conversion) -> int:
    """Check the written files; print what the user must add or correct; return 0."""
    sys.stdout.write(f"wrote {context_dir / JSON_NAME} and {path}\n")
    for idx, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
        if MARK in line:
            sys.stdout.write(f"choose: {path.name}:{idx}: {line.strip().removeprefix('# ')}\n")
    check = f"`dstrial check {path} {context_dir}`"
    if conversion.choices.entrypoint is None:
        # Only the script determines how "auto" values are resolved.
        sys.stdout.write(f"next: name the script in {path}, then {check}\n")
        return 0
    try:
        checked = load_experiment(path, context_dir, require_concrete=False, require_entrypoint=True)
    except ConfigError as error:
        sys.stdout.write(
            "".join(f"next: {problem}\n" for problem in error.problems) + f"next: then {check}\n"
        )
        return 0
    sys.stdout.write("".join(f"warning: {warning}\n" for warning in checked.warnings))
    sys.stdout.write(f"{path}: ok\nnext: `dstrial run {path} {context_dir}`\n")
    return 0
