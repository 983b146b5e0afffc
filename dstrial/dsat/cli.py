"""Command line options of dsat."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from dstrial.dsat.core.outcome import METRIC_NAMES
from dstrial.dsat.methods import METHOD_NAMES, PREDICT
from dstrial.dsat.predictor.hardware import DEVICES

PLAN = "plan"
"""The subcommand that predicts for other hardware, and measures nothing."""

# Method or ``plan`` -> its line in the help.
_SUMMARIES = {
    PREDICT: "predict all configurations from dry runs, measure only those that may be best (the default method)",
    "asha": "random settings, each with a binary search for the largest micro batch; ASHA gives the best settings more trials",
    "binary": "random settings, each with a binary search for the largest micro batch",
    "random": "random settings with random micro batches",
    PLAN: "predict which configurations fit and are fastest on other hardware; measures nothing",
}
# Patterns of ``parse_duration`` (hours, minutes, seconds) and ``parse_bytes`` (number, prefix, i).
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_BYTES = re.compile(r"(\d*\.?\d+)\s*([KMGT]?)(I?)B?")


def parse_duration(text: str) -> float:
    """Convert a duration such as ``30m``, ``90s`` or ``1h30m`` to seconds."""
    found = _DURATION.fullmatch(text.strip().lower())
    parts = found.groups() if found else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False) if part)
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"the value is {text!r}; expected a length of time above 0. Write 30m, 90s or 1h30m."
        )
    return seconds


def parse_bytes(text: str) -> int:
    """Convert a size such as ``80GiB``, ``24G`` or ``85899345920`` to bytes."""
    found = _BYTES.fullmatch(text.strip().upper())
    number = 0.0
    if found and (found[2] or not found[3]):
        number = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; expected 80GiB, for example")
    return int(number)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least {least}")
        return int(text)

    return parse


def _positive(text: str) -> float:
    try:
        if (number := float(text)) > 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")


def _slots(text: str) -> tuple[int, ...]:
    return tuple(map(_at_least(1), text.split(",")))


def _count_or_path(text: str) -> int | str:
    return _at_least(1)(text) if text.isdecimal() else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The command line options of a search or of ``plan``, with defaults filled in."""

    search_method: str
    config_path: str
    model_dir: str
    is_plan: bool = False
    include: Sequence[str] = ()
    max_trials: int = 64
    max_slots: int | None = None
    max_concurrent_trials: int | None = None
    metric: str = "FLOPS_per_gpu"
    run_full_experiment: bool = False
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    start_profile_step: int = 3
    end_profile_step: int = 5
    random_seed: int = 42
    search_runner_config: str | None = None
    max_search_runner_restarts: int | None = None
    budget: float | None = None  # seconds
    train_batch_size: int | None = None
    free_batch: bool = False
    space: str | None = None
    tune: Sequence[str] = ()
    output: str | None = None
    local: bool = False
    fresh: bool = False
    trial_timeout: float = 1800.0  # seconds
    measure_seconds: float = 60.0
    # of predict
    thorough: bool = False
    sample_batch: int | str | None = None
    trust_code: bool = False
    # of asha, binary and random
    search_range_factor: float = 1.0
    max_rungs: int = 5
    min_binary_search_trials: int = 3
    divisor: int = 2
    asha_early_stopping: int = 0
    trials_per_random_config: int = 5
    early_stopping: int | None = None
    # of plan
    slots: Sequence[int] | None = None
    device: str | None = None
    device_memory: int | None = None  # bytes
    per_machine: int = 8
    price: float | None = None

    def fingerprinted(self) -> dict[str, Any]:
        """Return (as name -> value) the options that must not change to resume a search."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _RESUMING}


_RESUMING = (
    *("run_full_experiment", "budget", "output", "local", "fresh", "trial_timeout", "is_plan"),
    *("slots", "device", "device_memory", "per_machine", "price"),
)
"""Options that a command which resumes a search may change."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SearchFlags)}


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Tune the DeepSpeed configuration of an experiment."
    )
    add_methods(parser.add_subparsers(dest="search_method", metavar="METHOD", required=True))
    return parser


def with_method(words: Sequence[str]) -> list[str]:
    """Return the command line, with the default method in front if none is named."""
    is_named = not words or words[0] in (*METHOD_NAMES, PLAN, "-h", "--help")
    return list(words) if is_named else [PREDICT, *words]


def add_methods(subparsers: Any) -> None:
    """Add a parser per search method, and that of ``plan``, to argparse's subparsers."""
    for method, summary in _SUMMARIES.items():
        parser = subparsers.add_parser(method, help=summary, description=summary)
        parser.add_argument("config_path", metavar="CONFIG.yaml", help="experiment config")
        parser.add_argument("model_dir", metavar="MODEL_DIR", help="model definition directory")
        if method == PLAN:
            _add_plan_flags(parser)
        else:
            _add_search_flags(parser)
        if method in (PREDICT, PLAN):
            _add_sample_flags(parser)
        else:
            parser.set_defaults(zero_stages=(1, 2, 3))
        _add_method_flags(parser, method)


def flags_of(args: argparse.Namespace) -> SearchFlags:
    """Return the options of a parsed command line."""
    # A plan has the flags of the method ``predict``.
    is_plan = args.search_method == PLAN
    values = {name: value for name, value in vars(args).items() if name in _DEFAULTS}
    return SearchFlags(
        **{**values, "search_method": PREDICT if is_plan else args.search_method, "is_plan": is_plan}
    )


def _add(parser: argparse.ArgumentParser, names: str, text: str, **options: Any) -> None:
    """Add an option, spelled with hyphens and with underscores, to ``parser``.

    ``names`` are its names, the long one last; ``text`` is its help. The default is that of ``SearchFlags``.
    """
    *short, long = names.split()
    dest = long.removeprefix("--").replace("-", "_")
    if _DEFAULTS[dest] is False:
        options = {"action": "store_true"}
    spelled = dict.fromkeys((*short, long, f"--{dest}"))
    parser.add_argument(*spelled, **{"default": _DEFAULTS[dest], "help": text, **options})


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    _add(parser, "-z --zero-stages", "ZeRO stages to try", nargs="+", choices=range(4), type=int)
    text = "global batch size (that of the config)"
    _add(parser, "--train-batch-size", text, type=_at_least(1))
    text = "let the global batch size change with the micro batch; this changes the training results"
    _add(parser, "--free-batch", text)
    text = "YAML file with further settings to try: dotted path -> list of values"
    _add(parser, "--space", text, metavar="FILE")
    text = "values of a further setting to try, such as tensor_parallel.autotp_size=1,2; repeatable"
    _add(parser, "--tune", text, action="append", default=[], metavar="KEY=V1,V2")
    _add(parser, "--output", "directory of the results (dsat/EXPERIMENT-METHOD, or plan)", metavar="DIR")


def _add_search_flags(parser: argparse.ArgumentParser) -> None:
    text = "further files or directories that the trials need"
    _add(parser, "-i --include", text, nargs="+", metavar="PATH")
    _add(
        parser,
        "-mt --max-trials",
        "maximum number of trials, the first trial included (64)",
        type=_at_least(1),
    )
    _add(parser, "-ms --max-slots", "maximum number of slots in use at the same time", type=_at_least(1))
    text = "maximum number of trials at the same time; default: one per machine and at most 16, because trials on the same "
    text += "machine slow each other down"
    _add(parser, "-mct --max-concurrent-trials", text, type=_at_least(1))
    _add(parser, "-m --metric", "metric to optimize (FLOPS_per_gpu)", choices=METRIC_NAMES)
    text = "train the experiment with the best configuration after the search"
    _add(parser, "--run-full-experiment", text)
    text = "first step of a trial that may be measured (3)"
    _add(parser, "--start-profile-step", text, type=_at_least(0))
    text = "a trial trains at least END_PROFILE_STEP + 1 steps (5)"
    _add(parser, "--end-profile-step", text, type=_at_least(0))
    _add(parser, "-r --random-seed", "seed of the search (42)", type=_at_least(0))
    text = "no effect; pool, labels, workspace and project are those of CONFIG.yaml"
    _add(parser, "--search-runner-config", text, metavar="PATH")
    text = "no effect; to resume a search, repeat the same command"
    _add(parser, "--max-search-runner-restarts", text, type=_at_least(0))
    text = "time limit of the search: then no trial starts, and running trials are ended"
    _add(parser, "--budget", text, metavar="30m", type=parse_duration)
    _add_shared_flags(parser)
    _add(parser, "--local", "measure on this machine, without a master")
    _add(parser, "--fresh", "start a new search in a new directory instead of resuming the last search")
    text = "time limit of a trial whose duration cannot be predicted (30m)"
    _add(parser, "--trial-timeout", text, metavar="30m", type=parse_duration)
    _add(parser, "--measure-seconds", "maximum seconds of measured steps in a trial (60)", type=_positive)


def _add_sample_flags(parser: argparse.ArgumentParser) -> None:
    text = "batch for dry runs: the largest of the first N batches of the training loader (4), or a FILE written by `torch.save` "
    text += "with a batch of the loader, or, for a script, with the arguments of its engine"
    _add(parser, "--sample-batch", text, metavar="N|FILE", type=_count_or_path)
    text = "load the file of --sample-batch even if it has classes other than tensors and plain values; such classes can run "
    text += "any code, so trust the file's author"
    _add(parser, "--trust-code", text)


def _add_method_flags(parser: argparse.ArgumentParser, method: str) -> None:
    if method == PREDICT:
        _add(parser, "--thorough", "use up to twice as many trials, to find smaller gains, too")
    if method in ("asha", "binary"):
        text = "factor on the first estimate of the largest micro batch (1.0)"
        _add(parser, "--search-range-factor", text, type=_positive)
    if method == "asha":
        _add(parser, "--max-rungs", "number of ASHA rungs (5)", type=_at_least(1))
        text = "number of trials of one binary search in the lowest rung (3)"
        _add(parser, "--min-binary-search-trials", text, type=_at_least(1))
        text = "1 / DIVISOR of the binary searches are promoted to the next rung (2)"
        _add(parser, "--divisor", text, type=_at_least(2))
        _add(parser, "--asha-early-stopping", "number of lowest rungs to skip (0)", type=_at_least(0))
    if method == "random":
        text = "maximum number of trials with the same random settings (5)"
        _add(parser, "--trials-per-random-config", text, type=_at_least(1))
        text = "end the search after this number of trials without a new best trial"
        _add(parser, "--early-stopping", text, type=_at_least(1))


def _add_plan_flags(parser: argparse.ArgumentParser) -> None:
    text = "numbers of ranks to predict for (the config's slots_per_trial)"
    _add(parser, "--slots", text, metavar="N,…", type=_slots)
    text = "type of device; sets speed and memory (memory: unless --device-memory is given)"
    _add(parser, "--device", text, choices=tuple(DEVICES))
    text = "memory of one device (that of --device, else of an a100)"
    _add(parser, "--device-memory", text, metavar="80GiB", type=parse_bytes)
    _add(parser, "--per-machine", "number of devices in one machine (8)", type=_at_least(1))
    text = "price of one device per hour; then the cost of an epoch is shown"
    _add(parser, "--price", text, metavar="2.5", type=float)
    _add_shared_flags(parser)
