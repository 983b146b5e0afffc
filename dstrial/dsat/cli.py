"""Command line options of dsat, each with its default, lower bound and help text."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.core.outcome import METRIC_NAMES
from dstrial.dsat.methods import METHOD_NAMES, METHODS
from dstrial.dsat.predictor.hardware import DEVICES

PLAN = "plan"
"""The subcommand that predicts for other hardware, and measures nothing."""

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


def _slots(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; expected 8 or 1,2,4,8")
    return numbers


def _count_or_path(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _flag(
    default: Any,
    text: str,
    short: str | None = None,
    *,
    least: int | None = None,
    resumes: bool = False,
    **options: Any,
) -> Any:
    """Return a dataclass field that is also a command line option with help ``text``.

    ``least`` is the smallest valid value. If ``resumes`` is true, a command with another value of this option resumes the
    search; if false, it begins a new search. ``options`` are keyword arguments of ``add_argument``.
    """
    metadata = {"help": text, "short": short, "least": least, "resumes": resumes, "options": options}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The command line options of a search or of ``plan``, with defaults filled in."""

    search_method: str
    config_path: str
    model_dir: str
    include: Sequence[str] = _flag(
        (), "further files or directories that the trials need", "-i", nargs="+", metavar="PATH"
    )
    max_trials: int = _flag(64, "maximum number of trials, the first trial included (64)", "-mt", least=1)
    max_slots: int | None = _flag(
        None, "maximum number of slots in use at the same time", "-ms", least=1, type=int
    )
    max_concurrent_trials: int = _flag(
        16,
        "maximum number of trials at the same time; default: one per machine and at most 16, because trials on the same "
        "machine slow each other down",
        "-mct",
        least=1,
    )
    metric: str = _flag("FLOPS_per_gpu", "metric to optimize (FLOPS_per_gpu)", "-m", choices=METRIC_NAMES)
    run_full_experiment: bool = _flag(
        False, "train the experiment with the best configuration after the search", resumes=True
    )
    zero_stages: Sequence[int] = _flag(
        (0, 1, 2, 3), "ZeRO stages to try", "-z", nargs="+", choices=range(4), type=int
    )
    start_profile_step: int = _flag(3, "first step of a trial that may be measured (3)", least=0)
    end_profile_step: int = _flag(5, "a trial trains at least END_PROFILE_STEP + 1 steps (5)", least=0)
    random_seed: int = _flag(42, "seed of the search (42)", "-r", least=0)
    search_runner_config: str | None = _flag(
        None,
        "no effect; pool, labels, workspace and project are those of CONFIG.yaml",
        metavar="PATH",
    )
    max_search_runner_restarts: int = _flag(
        5, "no effect; to resume a search, repeat the same command", least=0
    )
    budget: float | None = _flag(
        None,
        "time limit of the search: then no trial starts, and running trials are ended",
        resumes=True,
        metavar="30m",
        type=parse_duration,
    )
    train_batch_size: int | None = _flag(
        None, "global batch size of all trials (that of the config)", least=1, type=int
    )
    free_batch: bool = _flag(
        False, "let the global batch size change with the micro batch; this changes the training results"
    )
    space: str | None = _flag(
        None, "YAML file with further settings to try: dotted path -> list of values", metavar="FILE"
    )
    output: str | None = _flag(
        None,
        "directory of the search (dsat/EXPERIMENT-METHOD)",
        resumes=True,
        metavar="DIR",
    )
    local: bool = _flag(False, "measure on this machine, without a master", resumes=True)
    fresh: bool = _flag(
        False,
        "start a new search in a new directory instead of resuming the last search",
        resumes=True,
    )
    no_gates: bool = _flag(
        False, "also measure configurations that are duplicates, illegal or expected to fail"
    )
    trial_timeout: float = _flag(
        1800.0,
        "time limit of a trial whose duration cannot be predicted (30m)",
        resumes=True,
        metavar="30m",
        type=parse_duration,
    )
    measure_seconds: float = _flag(60.0, "maximum seconds of measured steps in a trial (60)")
    sample_batch: int | str | None = _flag(
        None,
        "batch for dry runs: the largest of the first N batches of the training loader (4), or a FILE written by `torch.save` "
        "with a batch of the loader, or, for a script, with the arguments of its engine",
        least=1,
        metavar="N|FILE",
        type=_count_or_path,
    )
    trust_code: bool = _flag(
        False,
        "load the file of --sample-batch even if it has classes other than tensors and plain values; such classes can run "
        "any code, so trust the file's author",
    )
    slots: Sequence[int] | None = _flag(
        None,
        "numbers of ranks to predict for (the config's slots_per_trial)",
        resumes=True,
        metavar="N,…",
        type=_slots,
    )
    device: str | None = _flag(
        None,
        "type of device; sets speed and memory (memory: unless --device-memory is given)",
        resumes=True,
        choices=tuple(DEVICES),
    )
    device_memory: int | None = _flag(
        None,
        "memory of one device (that of --device, else of an a100)",
        resumes=True,
        metavar="80GiB",
        type=parse_bytes,
    )
    per_machine: int = _flag(8, "number of devices in one machine (8)", least=1, resumes=True)
    price: float | None = _flag(
        None,
        "price of one device per hour; then the cost of an epoch is shown",
        resumes=True,
        metavar="2.5",
        type=float,
    )
    is_plan: bool = False
    # name -> value of flags that only this method has
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()  # names of the flags on the command line

    def fingerprinted(self) -> dict[str, Any]:
        """Return name -> value of the options whose change begins a new search."""
        is_described = METHODS[self.search_method].predicts
        names = [name for name, field in FIELDS.items() if not field.metadata["resumes"]]
        kept = [name for name in names if is_described or name not in _DESCRIBING]
        values = {name: getattr(self, name) for name in ("search_method", "config_path", "model_dir", *kept)}
        return {**values, **self.own}


FIELDS = {field.name: field for field in dataclasses.fields(SearchFlags) if field.metadata}
"""Name of a flag -> its field of ``SearchFlags``."""
_DESCRIBING = ("sample_batch", "trust_code")
_OF_PLAN = ("slots", "device", "device_memory", "per_machine", "price")
_PLAN_ORDER = (*_OF_PLAN, "zero_stages", "train_batch_size", "free_batch", "space", "output", *_DESCRIBING)
_PLAN_HELP = {
    "train_batch_size": "global batch size (that of the config)",
    "free_batch": "let the global batch size change with the micro batch",
    "output": "directory of report.json (plan)",
}


class _Given(argparse.Action):
    """argparse action that stores the value and adds the option's name to ``given``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        del parser, option
        setattr(namespace, self.dest, values)
        namespace.given = frozenset({*namespace.given, self.dest})


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Tune the DeepSpeed configuration of an experiment."
    )
    add_methods(parser.add_subparsers(dest="search_method", metavar="METHOD", required=True))
    return parser


def with_method(words: Sequence[str]) -> list[str]:
    """Return the command line, with the default method in front if it names no method."""
    is_named = not words or words[0] in (*METHOD_NAMES, PLAN, "-h", "--help")
    return list(words) if is_named else [METHOD_NAMES[0], *words]


def add_methods(subparsers: Any) -> None:
    for method in METHODS.values():
        parser = _parser_of(subparsers, method.name, method.summary)
        for name in FIELDS:
            if name not in _OF_PLAN and (method.predicts or name not in _DESCRIBING):
                _add_field(parser, name)
        parser.set_defaults(zero_stages=method.zero_stages)
        for flag in method.flags:
            _add(parser, (flag.name,), flag.default, flag.help, {"type": flag.kind})
    text = "predict which configurations fit and are fastest on other hardware; measures nothing"
    parser = _parser_of(subparsers, PLAN, text)
    for name in _PLAN_ORDER:
        _add_field(parser, name, _PLAN_HELP.get(name))


def flags_of(args: argparse.Namespace) -> SearchFlags:
    # A plan has the flags of the method ``predict``.
    is_plan = args.search_method == PLAN
    method = METHOD_NAMES[0] if is_plan else args.search_method
    known = {field.name for field in dataclasses.fields(SearchFlags)}
    values = {name: value for name, value in vars(args).items() if name in known}
    own = {flag.dest: getattr(args, flag.dest, flag.default) for flag in METHODS[method].flags}
    return SearchFlags(**{**values, "search_method": method, "own": own, "is_plan": is_plan})


def _parser_of(subparsers: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
    parser.set_defaults(given=frozenset())
    parser.add_argument("config_path", metavar="CONFIG.yaml", help="experiment config")
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="model definition directory")
    return parser


def _add_field(parser: argparse.ArgumentParser, name: str, text: str | None = None) -> None:
    field = FIELDS[name]
    options = dict(field.metadata["options"])
    if isinstance(field.default, (int, float)):
        options.setdefault("type", type(field.default))
    short = field.metadata["short"]
    names = (*([short] if short else []), "--" + name.replace("_", "-"))
    _add(parser, names, field.default, text or field.metadata["help"], options)


def _add(
    parser: argparse.ArgumentParser, names: Sequence[str], default: Any, text: str, options: Mapping[str, Any]
) -> None:
    long = names[-1]
    spelled = dict.fromkeys((*names, "--" + long.removeprefix("--").replace("-", "_")))
    if default is False:
        parser.add_argument(*spelled, action="store_true", help=text)
    else:
        parser.add_argument(*spelled, default=default, help=text, **{"action": _Given, **options})
