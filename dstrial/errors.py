"""All exceptions that dstrial raises on purpose, and ``ConfigProblem``.

The hierarchy::

    DstrialError
    ├── ConfigError (also a ValueError)
    ├── TrialImportError
    ├── TrialContractError
    ├── NonFiniteError
    ├── DataError
    ├── CheckpointError
    │   ├── CheckpointNotFoundError
    │   ├── CheckpointDamagedError
    │   ├── CheckpointLayoutError (also an AssertionError)
    │   └── UntrustedCheckpointError
    ├── RankError
    │   ├── PeerFailedError
    │   ├── RankTimeoutError
    │   ├── RankStalledError
    │   └── RankIdentityError
    ├── LaunchError
    │   ├── HostError
    │   └── RankFailedError
    ├── MissingExtraError (also an ImportError)
    ├── SearchError
    └── MasterError
        ├── DatabaseDamagedError
        └── RequestError

Not in the hierarchy: ``storage_guard.StorageGoneError``, an ``OSError``, is raised if the checkpoint storage is missing. Every
message has the place, the value found, the expected value and a fix.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

_package = sys.modules["dstrial"]
if getattr(_package, "__file__", None) is None:
    # Even with setuptools' editable install, Python prefers a directory of this name in the working directory.
    raise ImportError(
        f"Python imports the directory {_package.__path__[0]} in place of the installed package dstrial; expected no such "
        "directory beside the script or in the working directory. Start in another directory, or rename this one."
    )


def install_command(extra: str = "") -> str:
    """Return the ``pip`` command that installs dstrial, for error messages.

    ``extra`` is the optional extra to install, such as those of ``MissingExtraError``; "" for none. The command has a
    placeholder for a checkout or wheel, because on PyPI another project has the name dstrial.
    """
    return f"pip install 'DSTRIAL_CHECKOUT_OR_WHEEL{extra and f'[{extra}]'}'"


class DstrialError(Exception):
    """Base class of every exception that dstrial raises on purpose."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem of a configuration.

    Attributes:
        where: ``file:line: key`` (without line for values such as those from the command line).
        got: the wrong value as the user wrote it, as display text.
        expected: the accepted values, without a full stop.
        fix: one imperative sentence with a full stop.
    """

    where: str
    got: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where} is {self.got}; expected {self.expected}. {self.fix}"


class ConfigError(DstrialError, ValueError):
    """The experiment config or DeepSpeed JSON is wrong; ``problems`` has all problems.

    Args:
        problems: at least one problem, in file order.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class TrialImportError(DstrialError):
    """The model definition cannot be imported, or lacks the configured trial class."""


class TrialContractError(DstrialError):
    """User code broke the contract of ``DeepSpeedTrial`` or ``DeepSpeedTrialContext``."""


class NonFiniteError(DstrialError):
    """Training failed numerically: no finite loss, no optimizer step, or bad weights.

    The loss or the steps failed in several consecutive reports, or weights are NaN or infinite.
    """


class DataError(DstrialError):
    """A data loader cannot be used: for example, it is too short or differs by rank."""


class CheckpointError(DstrialError):
    """A checkpoint cannot be written or used."""


class CheckpointNotFoundError(CheckpointError):
    """There is no complete checkpoint to resume from."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint file is missing or unreadable, or has changed since the save."""


class CheckpointLayoutError(CheckpointError, AssertionError):
    """A checkpoint does not fit the ranks, the model or the requested export format.

    Also an ``AssertionError``: Determined 0.38.1 raises that if DeepSpeed has not loaded the checkpoint
    (``_deepspeed_trial.py``), and user code may catch it.
    """


class UntrustedCheckpointError(CheckpointError):
    """Loading a checkpoint file could run code; the message names file and class."""


class RankError(DstrialError):
    """The ranks of this job are inconsistent, or cannot communicate."""


class PeerFailedError(RankError):
    """User code failed on another rank, so that this rank must end too."""


class RankStalledError(RankError):
    """Ranks stalled, and the launcher ended them; the message names the straggler."""


class RankTimeoutError(RankError):
    """A collective operation timed out; the message names the missing ranks."""


class RankIdentityError(RankError):
    """The environment variables that define this process's rank are inconsistent."""


class LaunchError(DstrialError):
    """Ranks could not be started."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostProblem:
    """One problem that keeps a host from training together with the other hosts.

    Attributes:
        host: the host's name in the hostfile.
        got: what is wrong, without a full stop; the message shows it beside the host's name.
        fix: one imperative sentence with a full stop.
    """

    host: str
    got: str
    fix: str


class HostError(LaunchError):
    """Hosts cannot train together; the message and ``problems`` list all problems.

    Args:
        problems: at least one problem; a host may have several.
        num_hosts: number of hosts that were checked.
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
    """A started rank exited with a failure; the message names the first such rank."""


class MissingExtraError(DstrialError, ImportError):
    """An optional library that an integration needs is missing."""


class SearchError(DstrialError):
    """A search for hyperparameters or configurations cannot start or continue."""


class MasterError(DstrialError):
    """dstrial's master (the server of ``dstrial up``) cannot start, stop or continue."""


class DatabaseDamagedError(MasterError):
    """The master's database is damaged or lost; the message has the recovery command."""


class RequestError(MasterError):
    """The master rejects an HTTP request.

    Args:
        status: HTTP status: 400 invalid, 401 no valid token, 403 forbidden, 404 not found, 409 conflict, 413 too
            large, 501 not implemented.
        message: the problem and a fix, for the sender of the request.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
