"""``dstrial check``: validate an experiment config before it is submitted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from dstrial.cli.experiment_arguments import add_experiment_arguments, resume_point_of
from dstrial.cli.streams import add_runs_dir_argument, context_text, text_table
from dstrial.config.deepspeed_rules.check import DEFAULT_ORIGIN, CheckResult, explain
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.config.schema import experiment_schema
from dstrial.config.secrets import SecretNames, masked
from dstrial.context_directory import Context, list_context
from dstrial.errors import ConfigError
from dstrial.launch.slots import slots_argument
from dstrial.visible_text import plural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_SECRETS = SecretNames()


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        description="Check an experiment config and the DeepSpeed config it names. Exits 0 if training can start, "
        "1 if not; all problems are listed at once. Starts no process and imports neither torch nor deepspeed.",
    )
    add_experiment_arguments(parser)
    parser.add_argument(
        "--slots", type=slots_argument, metavar="N", help="check for N slots instead of slots_per_trial"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the effective DeepSpeed config without DeepSpeed's defaults, and the origin of each value",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="with_defaults",
        help="with --explain: also print DeepSpeed's defaults",
    )
    parser.add_argument(
        "--resume",
        metavar="latest|RUN_DIR|CHECKPOINT",
        help="check whether a checkpoint of `dstrial run` can be resumed with this config on these slots",
    )
    add_runs_dir_argument(parser)
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON object instead of text"
    )
    parser.add_argument(
        "--schema",
        action=_PrintSchema,
        nargs=0,
        help="print the JSON Schema of experiment configs, for editors, and exit",
    )


class _PrintSchema(argparse.Action):
    """Action that prints the JSON Schema and exits, so that no config is required."""

    def __call__(self, parser: argparse.ArgumentParser, *_unused: object, **__unused: object) -> None:
        _print_json(experiment_schema())
        parser.exit()


def main(args: argparse.Namespace) -> int:
    """Check the experiment config, print the result; return 0 if valid, else 1."""
    try:
        point = resume_point_of(args)
        config = load_experiment(
            args.experiment,
            args.context_dir,
            args.config,
            require_concrete=False,
            require_entrypoint=True,
            slots=args.slots,
            resumed=None if point is None else point.saved_run(),
        )
        context = list_context(config.context_dir)
        context.require_packable()
    except ConfigError as error:
        if args.as_json:
            problems = [{**dataclasses.asdict(one), "message": str(one)} for one in error.problems]
            _print_json({"ok": False, "problems": problems})
        else:
            for problem in error.problems:
                sys.stderr.write(f"{problem}\n")
            sys.stderr.write(f"{args.experiment}: {plural(len(error.problems), 'problem')}\n")
        return 1
    if args.as_json:
        _print_json(_summary(config, context, with_values=args.explain or args.with_defaults))
    else:
        _print_text(
            config, context, with_values=args.explain or args.with_defaults, with_defaults=args.with_defaults
        )
    return 0


def _summary(config: ExperimentConfig, context: Context, *, with_values: bool) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    for key, (source, checked) in config.engines.items():
        configs[key] = {
            "file": source.label,
            "batch_equation": checked.batch.equation if checked.batch else None,
        }
        if with_values:
            configs[key]["effective"] = masked(checked.effective, _SECRETS)
            configs[key]["origins"] = {row.key: row.origin for row in explain(source, checked)}
    return {
        "ok": True,
        "problems": [],
        "warnings": list(config.warnings),
        "notes": list(config.notes),
        "context": {
            "files": context.num_files,
            "bytes": context.num_bytes,
            "largest": context.largest()[0],
            "left_out": list(context.left_out),
        },
        "deepspeed": configs,
    }


def _print_text(
    config: ExperimentConfig, context: Context, *, with_values: bool, with_defaults: bool
) -> None:
    checks = config.engines
    if with_values:
        for key, (source, checked) in checks.items():
            _print_table(
                f"hyperparameters.{key} ({source.label})", source, checked, with_defaults=with_defaults
            )
    for warning in config.warnings:
        sys.stdout.write(f"warning: {warning}\n")
    for note in config.notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"context directory: {context_text(context)}\n")
    for source, checked in checks.values():
        if checked.batch:
            sys.stdout.write(f"{source.label}: {checked.batch.equation}\n")
    sys.stdout.write(f"{config.path}: ok\n")


def _print_table(title: str, source: DeepSpeedSource, checked: CheckResult, *, with_defaults: bool) -> None:
    rows = explain(source, dataclasses.replace(checked, effective=masked(checked.effective, _SECRETS)))
    # A default that replaces an "auto" of the user has a longer origin, with the place of that "auto"; show it.
    shown = [row for row in rows if with_defaults or row.origin != DEFAULT_ORIGIN]
    cells = [(row.key, row.value, row.origin) for row in shown]
    sys.stdout.write(f"{title}\n{text_table(('key', 'value', 'from'), cells)}")
    if len(shown) < len(rows):
        sys.stdout.write(f"and {len(rows) - len(shown)} of DeepSpeed's defaults, which --all shows\n")


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
