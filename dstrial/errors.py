"""Every exception that dstrial raises on purpose, and a configuration's problem.

The tree, drawn once::

    DstrialError                      catch this to catch all of ours
    ├── ConfigError                   the experiment config or the DeepSpeed JSON is wrong (also a ValueError)
    ├── TrialImportError              the model definition cannot be imported or has no such class
    ├── TrialContractError            user code broke the contract of DeepSpeedTrial or its context
    ├── NonFiniteError                reports in a row without a finite loss or an optimizer step, or lost weights
    ├── DataError                     a loader is empty, too short, uneven between ranks, or ran out
    ├── CheckpointError               a checkpoint cannot be written or used
    │   ├── CheckpointNotFoundError   asked to resume, and there is nothing complete to resume from
    │   ├── CheckpointDamagedError    a file is missing or its size or checksum differs from the manifest
    │   ├── CheckpointLayoutError     it was written for another number or arrangement of ranks
    │   └── UntrustedCheckpointError  a file holds what would run code when it is loaded; names file and class
    ├── RankError                     the ranks of this job do not agree or cannot reach each other
    │   ├── PeerFailedError           user code failed on another rank, which this one agrees with to end
    │   ├── RankTimeoutError          a rank did not arrive at an operation in time; names the missing ranks
    │   ├── RankStalledError          ranks went on no more and were ended, as their config says; names who held them up
    │   └── RankIdentityError         the environment does not say consistently who this process is
    ├── LaunchError                   ranks could not be started
    │   ├── NodesUnknownError         Slurm refuses a job while it does not know all its nodes
    │   ├── HostError                 hosts cannot train together; carries every problem of every host
    │   └── RankFailedError           a started rank exited with a failure; names the first one
    ├── MissingExtraError             an optional library is missing that an integration needs (also an ImportError)
    ├── SearchError                   a searcher cannot go on with what a trial reported
    └── MasterError                   the embedded master cannot start, stop or go on
        ├── DatabaseDamagedError      its database is damaged or lost; names what and what to type
        └── RequestError              a request to it cannot be answered; carries the HTTP status

One more is an ``OSError``: ``storage_guard.StorageGoneError``, raised where a trial would save into a checkpoint storage that is
gone. Its module is loaded alone, before dstrial is.

Every message says where, what, what was expected and how to fix it. This module imports nothing
but the standard library, so that every other package may use it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

_package = sys.modules["dstrial"]
if getattr(_package, "__file__", None) is None:
    # So does setuptools' editable install, whose finder comes after the working directory.
    raise ImportError(
        f"Python imports the directory {_package.__path__[0]} in place of the installed package dstrial; expected no such "
        "directory beside the script or in the working directory. Start in another directory, or rename this one."
    )


def install_command(extra: str = "") -> str:
    """Return how to install dstrial; on PyPI another project has its name."""
    return f"pip install 'DSTRIAL_CHECKOUT_OR_WHEEL{extra and f'[{extra}]'}'"


class DstrialError(Exception):
    """Base of every exception that dstrial raises on purpose."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong with a configuration.

    Attributes:
        where: where it stands and under which key, as ``file:line: key`` (the line is left out
            where a value has none, for example one given on the command line).
        got: the offending value as the user wrote it, already rendered for a person.
        expected: what would have been accepted, without a trailing full stop.
        fix: one imperative sentence, with its full stop, that makes the problem go away.
    """

    where: str
    got: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where} is {self.got}; expected {self.expected}. {self.fix}"


class ConfigError(DstrialError, ValueError):
    """The configuration is wrong; carries every problem found, never only the first.

    Args:
        problems: at least one problem, in the order in which a reader meets them in the files.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class TrialImportError(DstrialError):
    """The model definition cannot be imported, or holds no such trial class."""


class TrialContractError(DstrialError):
    """User code broke the contract of ``DeepSpeedTrial`` or ``DeepSpeedTrialContext``."""


class NonFiniteError(DstrialError):
    """No loss is finite, no optimizer step is taken, or weights are not finite."""


class DataError(DstrialError):
    """A data loader is empty, too short, uneven between ranks, or ran out."""


class CheckpointError(DstrialError):
    """A checkpoint cannot be written or used."""


class CheckpointNotFoundError(CheckpointError):
    """Asked to resume, and there is no complete checkpoint to resume from."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint's file is missing, or not of the manifest's size or checksum."""


class CheckpointLayoutError(CheckpointError, AssertionError):
    """A checkpoint was written for another number or arrangement of ranks.

    Determined 0.38.1 asserts there that DeepSpeed has loaded the checkpoint (``_deepspeed_trial.py``), so code
    that was written for it catches ``AssertionError``.
    """


class UntrustedCheckpointError(CheckpointError):
    """A checkpoint holds classes or functions that are not on the list of safe ones."""


class RankError(DstrialError):
    """The ranks of this job do not agree, or cannot reach each other."""


class PeerFailedError(RankError):
    """User code failed on another rank, and all ranks have agreed to end."""


class RankStalledError(RankError):
    """Ranks went on no more, and their launcher has ended them, as their config says."""


class RankTimeoutError(RankError):
    """A rank did not arrive at a collective operation before its deadline."""


class RankIdentityError(RankError):
    """The environment variables do not say consistently which rank this process is."""


class LaunchError(DstrialError):
    """Ranks could not be started."""


class NodesUnknownError(LaunchError):
    """Slurm refuses a job while some of its nodes have not registered.

    It may take it soon.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class HostProblem:
    """One thing that keeps a host from training with the others.

    Attributes:
        host: its name in the hostfile.
        got: what is the case, to be read behind "is".
        fix: one imperative sentence, with its full stop, that makes the problem go away.
    """

    host: str
    got: str
    fix: str


class HostError(LaunchError):
    """Hosts cannot train together; carries every problem found, never only the first.

    Args:
        problems: at least one, host by host.
        num_hosts: how many were asked.
    """

    def __init__(self, problems: Sequence[HostProblem], num_hosts: int) -> None:
        self.problems: tuple[HostProblem, ...] = tuple(problems)
        names = {problem.host for problem in problems}
        width = max(len("host"), *(len(name) for name in names))
        rows = [f"  {problem.host:<{width}}  {problem.got}. {problem.fix}" for problem in problems]
        super().__init__(
            f"{len(names)} of {num_hosts} hosts cannot train with the others; expected all to be ready, so nothing was started:\n"
            + "\n".join(rows)
        )


class RankFailedError(LaunchError):
    """A started rank exited with a failure."""


class MissingExtraError(DstrialError, ImportError):
    """An optional library is missing that an integration needs."""


class SearchError(DstrialError):
    """A searcher cannot go on with what a trial reported; this ends the experiment."""


class MasterError(DstrialError):
    """The embedded master cannot start, stop or go on."""


class DatabaseDamagedError(MasterError):
    """The master's database is damaged or lost."""


class RequestError(MasterError):
    """A request to the master cannot be answered.

    Args:
        status: HTTP status: 400 invalid, 401 no valid token, 403 forbidden, 404 not found, 409 conflict, 413 too
            large, 501 not offered.
        message: what is wrong and how to fix it, for the person who sent the request.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
