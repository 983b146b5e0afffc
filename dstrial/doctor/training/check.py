"""What a training check is, which there are, what one finds and how it ends."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json, write_json_atomically


class Status(str, enum.Enum):
    """How a check ended."""

    OK = "ok"
    """It shows what it is there for."""
    FAILED = "failed"
    """Something does not work here; the reason and what to do are told."""
    NOT_APPLICABLE = "not applicable"
    """This machine or this version has nothing of that kind; the reason is told."""
    NOT_REACHED = "not reached"
    """The minutes were up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check, a process of its own.

    Attributes:
        name: for ``--only`` and ``--skip``.
        title: what it shows, in one line.
        module: has ``run(bench) -> Finding``; of ``module:function`` that function is called.
        needs_s: it is not begun with fewer seconds left than these.
        deadline_s: seconds after which it is ended as hanging.
        always: whether ``--only`` runs it too, because the report needs what it finds.
    """

    name: str
    title: str
    module: str
    needs_s: float
    deadline_s: float
    always: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a check that ended well has found.

    Attributes:
        summary: in one line, with the figures that matter.
        not_shown: what this machine cannot show of it; empty where nothing is missing.
    """

    summary: str
    not_shown: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a check ended.

    Attributes:
        summary: what was found, or why it failed, is not applicable or not reached.
        advice: what to do; empty where nothing is.
        not_shown: what this machine cannot show of it.
        deadline_s: how long it might have taken.
        facts: name -> JSON value, as far as the check came.
        output: the end of what it printed; empty where it ended well.
    """

    name: str
    title: str
    status: Status
    summary: str
    advice: str = ""
    not_shown: str = ""
    seconds: float = 0.0
    deadline_s: float = 0.0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **dataclasses.asdict(self),
            "status": self.status.value,
            "seconds": round(self.seconds, 1),
            "deadline_s": round(self.deadline_s, 1),
        }


class CheckFailedError(Exception):
    """What a check is there to show is not so.

    Args:
        reason: what is wrong.
        advice: what to do.
        output: the end of what a program of the check printed.
    """

    def __init__(self, reason: str, advice: str, output: str = "") -> None:
        super().__init__(reason)
        self.advice = advice
        self.output = output


class NotApplicableError(Exception):
    """A check has nothing to look at here; the message says why.

    Args:
        reason: why.
        advice: what would make it applicable; empty where nothing does.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


_CHECKS = "dstrial.doctor.training.checks"


def _check(
    name: str, title: str, needs_s: float, deadline_s: float, shared: str = "", *, always: bool = False
) -> Check:
    """Return a check of its own module, or of one that several share."""
    function = name.replace("-", "_")
    place = f"{shared}:check_{function}" if shared else function
    return Check(name, title, f"{_CHECKS}.{place}", needs_s, deadline_s, always)


CHECKS: tuple[Check, ...] = (
    _check("environment", "versions, driver, devices in torch and NVML, bf16", 5, 90, always=True),
    _check("precision", "ZeRO 0 to 3 in fp32, bf16 and fp16 train", 15, 150),
    _check("master-trial", "a ZeRO 1 trial through the embedded master", 15, 120, "master_trial"),
    _check("visible-devices", "CUDA_VISIBLE_DEVICES as index, UUID and MIG UUID", 10, 90, "devices"),
    _check("shared-device", "two gloo ranks on one device; a killed one is named", 20, 120, "devices"),
    _check("save", "checkpoints behind the loop: the stall, and every bit of the files", 12, 90, "saving"),
    _check("resume", "a resumed run equals an uninterrupted one, across ZeRO stages too", 20, 150, "saving"),
    _check("synchronisation", "nothing of dstrial's waits for the device between reports", 12, 90, "speed"),
    _check(
        "pinned-buffers",
        "more than 1,000 small tensors saved through pinned memory, one context",
        12,
        90,
        "saving",
    ),
    _check("recovery", "SIGKILL inside a step and out of memory on purpose, then the next trial", 25, 150),
    _check("flops", "matmul peak, FLOPs and MFU of a small GPT", 12, 90, "speed"),
    _check("dsat-worker", "five configurations in a living worker leave nothing behind", 15, 120),
    _check(
        "system-metrics",
        "metrics, telemetry and system metrics arrive at the master",
        15,
        120,
        "master_trial",
    ),
    _check(
        "warm-start", "a trial that starts as a fork trains as a new process does", 30, 180, "master_trial"
    ),
    _check(
        "operators",
        "DeepSpeed's FusedAdam and CPUAdam compile, behind a lock that a kill has left",
        60,
        300,
        "kernels",
    ),
    _check("compile", "torch.compile gives the same losses", 25, 240, "kernels"),
    _check("loop-overhead", "what dstrial's loop adds to a step", 12, 90, "speed"),
    _check("memory-prediction", "predicted against measured memory of six configurations", 25, 150),
)


def chosen(only: Sequence[str], skip: Sequence[str], checks: Sequence[Check] = CHECKS) -> tuple[Check, ...]:
    """Return the checks to run, in their order; no names in ``only`` stand for all.

    Checks that always run are not left out for want of their name.

    Raises:
        DstrialError: a name is none.
    """
    known = {check.name for check in checks}
    for option, names in (("--only", only), ("--skip", skip)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise DstrialError(
                f"{option} is {', '.join(unknown)}; expected names of training checks. "
                f"Choose from {', '.join(check.name for check in checks)}."
            )
    return tuple(
        check
        for check in checks
        if (not only or check.name in only or check.always) and check.name not in skip
    )


_PATTERN = "facts-*.json"


class Facts:
    """Names and JSON values in one file, which only one process writes.

    Args:
        path: the file; its directory must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def note(self, **values: Any) -> None:
        """Keep what was found."""
        self._values.update(values)
        write_json_atomically(self._path, self._values, sync=False)


def facts_path(directory: Path, program: str) -> Path:
    """Return the file of one program's facts."""
    return directory / f"facts-{program}.json"


def read_facts(path: Path) -> dict[str, Any]:
    """Return a program's facts; none where the file is missing or incomplete."""
    try:
        found = read_json(path)
    except (OSError, DstrialError):
        return {}
    return found if isinstance(found, dict) else {}


def all_facts(directory: Path) -> dict[str, Any]:
    """Return what a check and its programs have noted, together."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob(_PATTERN)):
        found.update(read_facts(path))
    return found
