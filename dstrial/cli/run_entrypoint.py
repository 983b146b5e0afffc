"""What ranks run for an experiment's entrypoint, in each form that configs have."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dstrial.errors import ConfigError, ConfigProblem

_TRIAL_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHELL_SYNTAX = re.compile(r"[;&|<>$`\n]")
_OUR_LAUNCHER = "dstrial.launch"
_LAUNCH_MODULES = (
    _OUR_LAUNCHER,
    "determined.launch.deepspeed",
    "determined.launch.torch_distributed",
    "determined.launch.horovod",
)
_OPTIONS_WITH_VALUE = ("--slots", "--config")
_FOREIGN_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate")


@dataclasses.dataclass(frozen=True, slots=True)
class Entrypoint:
    """A parsed entrypoint: a trial or the command of each rank."""

    trial: str | None  # ``module:Class``; None for a command
    words: tuple[str, ...] = ()  # the command for each rank
    starts_ranks: bool = False  # the command does so itself, and is started once


def parse_entrypoint(entrypoint: str | Sequence[str] | None, where: str) -> Entrypoint:
    """Parse an entrypoint, without launchers whose work ``dstrial run`` does itself.

    ``model_def:MyTrial`` and ``python3 -m dstrial.launch --trial model_def:MyTrial`` are trials; of ``python3 -m dstrial.launch
    train.py`` and of Determined's launch layers the script remains; any other command is run as it is, through a shell if it has
    shell syntax, as on a cluster.
    """
    if not entrypoint:
        raise _error(
            where, "not given", "Add entrypoint: model_def:MyTrial for class MyTrial in model_def.py."
        )
    if isinstance(entrypoint, str):
        try:
            words = tuple(shlex.split(entrypoint))
        except ValueError as error:
            raise _error(where, f"{entrypoint!r} ({error})", "Close the quotation.") from error
    else:
        words = tuple(entrypoint)
    if len(words) == 1 and _TRIAL_FORM.fullmatch(words[0]):
        return Entrypoint(words[0])
    launched = _behind_launcher(words)
    if isinstance(entrypoint, str) and _SHELL_SYNTAX.search(entrypoint):
        if launched is not None:
            fix = "Remove the shell syntax, or start the entrypoint in a shell yourself."
            raise _error(where, f"{entrypoint!r}, a launcher within shell syntax", fix)
        return Entrypoint(None, ("sh", "-c", entrypoint))
    if launched is not None:
        return _launched(launched, where, entrypoint)
    return Entrypoint(None, words, starts_ranks=Path(words[0]).name in _FOREIGN_LAUNCHERS)


def _behind_launcher(words: Sequence[str]) -> tuple[str, ...] | None:
    for word_idx, (flag, module) in enumerate(itertools.pairwise(words)):
        if flag == "-m" and module in _LAUNCH_MODULES:
            rest = tuple(words[word_idx + 2 :])
            if module != _OUR_LAUNCHER and "--" in rest:
                return rest[rest.index("--") + 1 :]
            return rest
    return None


def _launched(rest: tuple[str, ...], where: str, entrypoint: object) -> Entrypoint:
    while rest:
        option, separator, value = rest[0].partition("=")
        if option == "--trial":
            trial = value if separator else "".join(rest[1:2])
            if not _TRIAL_FORM.fullmatch(trial):
                raise _error(where, f"{entrypoint!r}", "Write --trial model_def:MyTrial.")
            return Entrypoint(trial)
        if option in _OPTIONS_WITH_VALUE:
            rest = rest[1 if separator else 2 :]
        elif rest[0] == "--":
            rest = rest[1:]
        else:
            return Entrypoint(None, rest)
    raise _error(where, f"{entrypoint!r}", "Add --trial model_def:MyTrial, or a script.")


def _error(where: str, got: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(f"{where}: entrypoint", got, "module:Class, or a command", fix)])
