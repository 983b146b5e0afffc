"""Parse dsat's command line: the flags of ``determined.pytorch.dsat``, and ours."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.dsat.core.outcome import METRIC_NAMES
from dstrial.dsat.flags import PlanFlags, SearchFlags
from dstrial.dsat.methods import METHOD_NAMES, METHODS
from dstrial.dsat.methods.base import MethodEntry
from dstrial.dsat.predictor.hardware import DEVICES
from dstrial.dsat.predictor.plan import parse_bytes
from dstrial.dsat.report.formatting import parse_duration

PLAN = "plan"
"""The subcommand that measures nothing."""


class _Given(argparse.Action):
    """Store a value, and that it was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        del parser, option
        setattr(namespace, self.dest, values)
        namespace.given = frozenset({*getattr(namespace, "given", ()), self.dest})


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Tune the DeepSpeed configuration of an experiment."
    )
    add_methods(parser.add_subparsers(dest="search_method", metavar="METHOD", required=True))
    return parser


def with_method(words: Sequence[str]) -> list[str]:
    """Return a command line with its method: the default one where it names none."""
    is_named = not words or words[0] in (*METHOD_NAMES, PLAN, "-h", "--help")
    return list(words) if is_named else [METHOD_NAMES[0], *words]


def add_methods(subparsers: Any) -> None:
    for method in METHODS.values():
        _add_arguments(_parser_of(subparsers, method.name, method.summary), method)
    add_plan(subparsers)


def _parser_of(subparsers: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
    parser.set_defaults(given=frozenset())
    parser.add_argument("config_path", metavar="CONFIG.yaml", help="experiment config")
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="model definition directory")
    return parser


def add_plan(subparsers: Any) -> None:
    text = "predict what fits and what is fastest on hardware that is not at hand; measures nothing"
    add = _adder(_parser_of(subparsers, PLAN, text))
    add("--slots", type=int, help="ranks in all (the config's slots_per_trial)")
    add(
        "--device",
        choices=tuple(DEVICES),
        help="which device, for its speed and, if that is not given, memory",
    )
    add(
        "--device-memory",
        type=_memory,
        metavar="80GiB",
        help="memory of one device (that of --device, or an a100)",
    )
    add("--per-machine", type=int, default=8, help="devices of one machine (8)")
    add(
        "-z", "--zero-stages", type=int, nargs="+", choices=range(4), default=(0, 1, 2, 3), help="ZeRO stages"
    )
    add("--train-batch-size", type=int, help="global batch, instead of the config's own")
    add("--free-batch", action="store_true", help="let the global batch follow the micro batch")
    add("--space", metavar="FILE", help="further paths and values to try: YAML, path -> list of values")
    add("--output", metavar="DIR", help="where report.json is written (plan)")
    _add_sample_batch(add)


def flags_of(args: argparse.Namespace) -> SearchFlags | PlanFlags:
    if args.search_method != PLAN:
        return _search_flags(vars(args))
    # A plan is a search by prediction that differs in nothing but what it was given.
    search = build_parser("dsat").parse_args([METHOD_NAMES[0], args.config_path, args.model_dir])
    given = {**vars(search), **vars(args), "search_method": METHOD_NAMES[0]}
    return PlanFlags(_search_flags(given), args.device, args.device_memory, args.per_machine)


def _search_flags(parsed: Mapping[str, Any]) -> SearchFlags:
    own = {flag.dest: parsed[flag.dest] for flag in METHODS[parsed["search_method"]].flags}
    names = {field.name for field in dataclasses.fields(SearchFlags)}
    return SearchFlags(own=own, **{name: value for name, value in parsed.items() if name in names})


def _add_arguments(parser: argparse.ArgumentParser, method: MethodEntry) -> None:
    add = _adder(parser)
    _add_old_flags(add, method)
    _add_search_flags(add)
    _add_run_flags(add)
    if method.predicts:
        _add_sample_batch(add)
    for flag in method.flags:
        if flag.kind is bool:
            add(flag.name, action="store_true", help=flag.help)
            continue
        default = {} if flag.default is None else {"default": flag.default}
        add(flag.name, type=flag.kind, help=flag.help, **default)


def _add_old_flags(add: Callable[..., None], method: MethodEntry) -> None:
    """Add the flags that ``determined.pytorch.dsat`` has, too."""
    add(
        "-i",
        "--include",
        nargs="+",
        default=[],
        metavar="PATH",
        help="further files or directories for the trials",
    )
    add("-mt", "--max-trials", type=int, default=64, help="most trials, the first one included (64)")
    add("-ms", "--max-slots", type=int, help="most slots in use at the same time")
    add(
        "-mct",
        "--max-concurrent-trials",
        type=int,
        default=16,
        help="most trials at the same time (16); unless it is given, one for each machine, for trials that share a "
        "machine disturb each other's times",
    )
    add(
        "-m",
        "--metric",
        choices=METRIC_NAMES,
        default="FLOPS_per_gpu",
        help="what is searched for (FLOPS_per_gpu)",
    )
    add(
        "--run-full-experiment",
        action="store_true",
        help="then train the experiment with the best configuration",
    )
    add(
        "-z",
        "--zero-stages",
        type=int,
        nargs="+",
        choices=range(4),
        default=method.zero_stages,
        help="ZeRO stages to try",
    )
    add("--start-profile-step", type=int, default=3, help="first step that may be measured (3)")
    add("--end-profile-step", type=int, default=5, help="a trial trains at least one step more than this (5)")
    add("-r", "--random-seed", type=int, default=42, help="seed of the search (42)")
    add(
        "--search-runner-config",
        metavar="PATH",
        help="accepted; pool, labels, workspace and project are those of CONFIG.yaml",
    )
    add(
        "--max-search-runner-restarts",
        type=int,
        default=5,
        help="accepted; the same command resumes the search",
    )


def _add_search_flags(add: Callable[..., None]) -> None:
    add(
        "--budget",
        type=_duration,
        metavar="30m",
        help="begin no trial after this time, and end what is running then",
    )
    add("--train-batch-size", type=int, help="global batch to keep, instead of the config's own")
    add(
        "--free-batch",
        action="store_true",
        help="let the global batch follow the micro batch, which changes what is learned",
    )
    add("--space", metavar="FILE", help="further paths and values to try: YAML, path -> list of values")
    add("--output", metavar="DIR", help="directory of the search (dsat/<experiment's name>-<method>)")


def _add_run_flags(add: Callable[..., None]) -> None:
    add("--local", action="store_true", help="measure on this machine, without a master")
    add(
        "--fresh",
        action="store_true",
        help="begin a new search in a new directory, instead of going on with the last",
    )
    add(
        "--no-worker",
        action="store_true",
        help="launch ranks anew for every configuration, as only `predict` of a trial class does not",
    )
    add("--no-gates", action="store_true", help="measure duplicates, illegal and hopeless configurations too")
    add(
        "--trial-timeout",
        type=_duration,
        default=1800.0,
        metavar="30m",
        help="longest time of a trial of which nothing is known (30m)",
    )
    add("--measure-seconds", type=float, default=60.0, help="most seconds of timed steps in a trial (60)")


def _add_sample_batch(add: Callable[..., None]) -> None:
    add(
        "--sample-batch",
        type=_sample_batch,
        metavar="N|FILE",
        help="what batches look like: the largest of so many first ones of the training loader (4), or one that `torch.save` "
        "has written, as the loader gives it; for a script, what its engine is called with",
    )
    add(
        "--trust-code",
        action="store_true",
        help="load the file of --sample-batch also where it holds other classes than tensors and plain values, which can run any "
        "code: for files of people whom you trust",
    )


def _adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Return a function that adds an option spelled with dashes and underscores."""

    def add(*flags: str, **options: Any) -> None:
        spelled = list(flags)
        for flag in flags:
            other = "--" + flag.removeprefix("--").replace("-", "_")
            if flag.startswith("--") and other not in spelled:
                spelled.append(other)
        if "action" not in options:
            options["action"] = _Given
        parser.add_argument(*spelled, **options)

    return add


def _sample_batch(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
