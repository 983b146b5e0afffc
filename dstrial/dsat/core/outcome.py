"""Outcomes of trials: measured metrics, or a classified failure.

A failing rank prints its failure to the log as one line (``failure_line``). Without such a line, ``failure_from_log``
classifies the last lines of the log.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.dsat.core.candidate import Candidate

# Metrics that a search can optimize.
METRICS_TO_MINIMIZE = ("forward", "backward", "latency")
METRICS_TO_MAXIMIZE = ("throughput", "FLOPS_per_gpu")
METRIC_NAMES = (*METRICS_TO_MINIMIZE, *METRICS_TO_MAXIMIZE)
# Metrics that bound the throughput to expect of a training, in samples/s.
LOWEST_EXPECTED, HIGHEST_EXPECTED = "lowest_expected_throughput", "highest_expected_throughput"

FAILURE_MARK = "DSTRIAL_DSAT_FAILURE "  # in a log, begins a rank's description of its failure as JSON

_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# Texts of error messages and logs, by the kind of failure that they mean.
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_DEVICE_OOM = re.compile(
    r"OutOfMemoryError|(CUDA|HIP|XPU|NPU|MPS)[^\n]{0,40}out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_HOST_OOM = re.compile(
    r"MemoryError\b|DefaultCPUAllocator|[Cc]annot allocate memory|\[Errno 12\]|oom-?kill|cudaHostAlloc"
)
_COMMUNICATION = re.compile(
    r"NCCL (error|WARN)|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|DistBackendError|DistNetworkError|"
    r"DistStoreError|Connection (closed by peer|reset by peer|refused)|RankTimeoutError|PeerLost|Socket Timeout"
)
_BAD_CONFIG = re.compile(
    r"ConfigError|pydantic[\w.]*ValidationError|ValidationError: \d+ validation error|DeepSpeedConfigError|"
    r"Check batch related parameters|dstrial\.launch: .*; expected|"
    r"DataError: the training loader has [1-9]\d* records; expected at least one batch|"
    r"Unable to JIT load the \w+ op|CUDAMismatchException|Ninja is required to load"
)
_NUMERIC = re.compile(r"FloatingPointError|loss scale already at minimum|NumericError|[Ll]oss is (nan|inf)")
_MASTERS_PREFIX = re.compile(r"^\[\d{4}-[^\]]*\] \S+ (\[rank=\d+\] )?\|\| ")  # of a log line on a master
_FAILED_FIRST = re.compile(r"rank \d+ failed first \((killed by)?")  # a line of the launcher
_NO_ROOM = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|\[Errno (28|122)\]|"
    r"PytorchStreamWriter failed writing file|database or disk is full"
)
_DEEPSPEED_FRAME = re.compile(r'File "[^"]*/deepspeed/[^"]*"')
# An innermost frame that dstrial.launch.tracebacks elides.
_RAISED_IN_DEEPSPEED = re.compile(r"^  \[.*; raised in deepspeed/[^\]]*\]$", re.MULTILINE)
# The master's line about a crashed trial, which repeats the line above it.
_MASTERS_VERDICT = re.compile(r"ERROR: Trial \d+ \(Experiment \d+\) crashed: ")


class FailureKind(str, enum.Enum):
    """Reasons why a trial has no measurement, such as an out-of-memory error."""

    DEVICE_OOM = "device out of memory"
    """The accelerator's allocator failed; the configuration would fail again."""
    HOST_OOM = "host out of memory"
    """The machine's memory ran out: an allocation was refused, or the kernel killed a rank."""
    BAD_CONFIG = "bad configuration"
    """DeepSpeed, or the check before it, refused the configuration."""
    USER_ERROR = "error in the training code"
    """Every configuration would fail, so the search stops."""
    COMMUNICATION = "communication"
    """Ranks lost their connection, or a signal ended one, for no other known reason."""
    TIMEOUT = "time-out"
    """The trial was killed after its deadline."""
    NUMERIC = "numeric"
    """The loss is not finite, or too many steps were skipped for overflow."""
    CANCELED = "canceled"
    """The measurement was ended from outside."""
    NO_ROOM = "no room on the disk"
    """The disk is full, so the search stops."""

    @property
    def is_out_of_memory(self) -> bool:
        return self in (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)

    @property
    def ends_search(self) -> bool:
        return self in (FailureKind.USER_ERROR, FailureKind.CANCELED, FailureKind.NO_ROOM)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The metrics that rank 0 of a trial measured; unmeasured ones are missing.

    A search can optimize ``throughput`` (samples/s of all ranks), ``latency``, ``forward`` and ``backward`` (µs per batch) and
    ``FLOPS_per_gpu`` (model FLOP/s). ``rank.step_timer`` computes all metrics.
    """

    metrics: Mapping[str, float]

    def value(self, metric: str) -> float | None:
        """Return a metric; None if it was not measured or is not finite."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a trial measured nothing."""

    kind: FailureKind
    message: str
    phase: str = ""  # ``init``, ``forward``, ``backward``, ``step`` or ``training``; empty if unknown
    requested_bytes: int | None = None  # size of the allocation that failed
    allocated_bytes: int | None = None  # on the device at the failure; the phase would have needed more
    rank: int | None = None  # rank that reported the failure; None if no rank did


NOTHING_MEASURED = Failure(
    FailureKind.USER_ERROR,
    "it ended without having measured anything: no DeepSpeed engine made enough steps in a dsat_reporting_context",
)
"""Outcome of a trial that ended without an error and without a measurement."""

Outcome: TypeAlias = Measured | Failure


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values, without metrics that are not finite."""
    if isinstance(outcome, Measured):
        return {"metrics": {name: value for name, value in outcome.metrics.items() if math.isfinite(value)}}
    return {"failure": {**dataclasses.asdict(outcome), "kind": outcome.kind.name}}


def outcome_from_json(fields: Mapping[str, Any]) -> Outcome:
    if "metrics" in fields:
        return Measured(dict(fields["metrics"]))
    failure = dict(fields["failure"])
    return Failure(FailureKind[failure.pop("kind")], **failure)


def smaller_is_better(metric: str) -> bool:
    if metric not in METRIC_NAMES:
        raise ValueError(
            f"metric is {metric!r}; expected one of {', '.join(METRIC_NAMES)}. Choose one of them."
        )
    return metric in METRICS_TO_MINIMIZE


def score(outcome: Outcome, metric: str) -> float | None:
    """Return a measured metric, negated if smaller is better; None if unmeasured."""
    value = outcome.value(metric) if isinstance(outcome, Measured) else None
    if value is None:
        return None
    return -value if smaller_is_better(metric) else value


def classify(text: str, *, phase: str = "") -> Failure:
    """Return the failure described by a traceback or by the last lines of a log.

    ``phase`` is that of the failure (``Failure.phase``), empty if unknown. An ``AssertionError``, ``ValueError`` or
    ``NotImplementedError`` from DeepSpeed means a rejected configuration in phase ``init`` or unknown, else a user error.
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    message = next(
        (line.strip() for line in reversed(lines) if _names_an_error(line)),
        next(
            (line.strip() for line in lines if _FAILED_FIRST.match(line)), lines[-1].strip() if lines else ""
        ),
    )
    tried = _TRIED.search(text)
    requested = int(float(tried[1]) * _UNITS[tried[2].lower()]) if tried else _plain_bytes(text)
    # The message has priority over the stack frames, whose names and paths may match by chance.
    for where in (message, text):
        if _HOST_OOM.search(where) and not _DEVICE_OOM.search(where):
            return Failure(FailureKind.HOST_OOM, message, phase, requested)
        if _DEVICE_OOM.search(where):
            return Failure(FailureKind.DEVICE_OOM, message, phase, requested)
        for kind, pattern in (
            (FailureKind.NO_ROOM, _NO_ROOM),
            (FailureKind.BAD_CONFIG, _BAD_CONFIG),
            (FailureKind.NUMERIC, _NUMERIC),
            (FailureKind.COMMUNICATION, _COMMUNICATION),
        ):
            if pattern.search(where):
                return Failure(kind, message, phase)
    frames = re.findall(r'File "[^"]*"', text)
    raised_in_deepspeed = bool(frames and _DEEPSPEED_FRAME.fullmatch(frames[-1])) or bool(
        _RAISED_IN_DEEPSPEED.search(text)
    )
    refused = message.startswith(("AssertionError", "ValueError", "NotImplementedError"))
    if raised_in_deepspeed and refused and phase in ("", "init"):
        return Failure(FailureKind.BAD_CONFIG, message, phase)
    if (ended := _FAILED_FIRST.match(message)) and ended[1]:
        return Failure(FailureKind.COMMUNICATION, message, phase)
    return Failure(FailureKind.USER_ERROR, message or "it ended without a message", phase)


def failure_line(failure: Failure) -> str:
    """Return the line by which a rank reports its failure, without its line break."""
    return FAILURE_MARK + json.dumps(outcome_to_json(failure)["failure"])


def failure_from_log(lines: Sequence[str], *, exit_code: int | None = None) -> Failure:
    """Return the failure that the output of a trial's ranks describes.

    ``lines`` are the output of all ranks; ``exit_code`` is that of the launcher, None if unknown. Lines by which a rank reports
    its failure (:func:`failure_line`) have priority over other text. A lost connection counts only without another failure,
    because another rank's failure may have caused it. SIGKILL means ``HOST_OOM``.
    """
    lines = [_MASTERS_PREFIX.sub("", line) for line in lines]
    failures: list[Failure] = []
    for line in lines:
        _, mark, rest = line.partition(FAILURE_MARK)
        if mark:
            try:
                found = outcome_from_json({"failure": json.loads(rest)})
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(found, Failure):
                failures.append(found)
    first = min(failures, key=lambda failure: failure.kind is FailureKind.COMMUNICATION, default=None)
    if first is not None and first.kind is not FailureKind.COMMUNICATION:
        return first
    if exit_code in (137, -9) or "killed by SIGKILL" in "\n".join(lines[-200:]):
        return Failure(
            FailureKind.HOST_OOM, "a rank was killed by SIGKILL, as the kernel does when memory runs out"
        )
    if first is not None:
        ended = next((line.strip() for line in lines if _FAILED_FIRST.match(line)), first.message)
        return dataclasses.replace(first, message=ended)
    return classify("\n".join(line for line in lines[-200:] if not _MASTERS_VERDICT.match(line)))


def _names_an_error(line: str) -> bool:
    return (
        re.match(r"\s*[\w.]*(Error|Exception|Exit|Interrupt)\b(:|$)", line) is not None
        or "; expected" in line
    )


def _plain_bytes(text: str) -> int | None:
    found = re.search(r"you tried to allocate (\d+) bytes", text)
    return int(found[1]) if found else None


TIE = 0.01  # relative gain over the user's own configuration up to which the user's own counts as the best
USUAL_HALF_WIDTH = 0.02  # assumed relative half-width of the 95 % interval, if a measurement has none


@dataclasses.dataclass(frozen=True, slots=True)
class TrialResult:
    """A trial of a search; its outcome is None until the trial has ended."""

    trial_id: int
    candidate: Candidate
    description: str  # the configuration as a line of text
    why: str  # why the search method chose it
    outcome: Outcome | None = None
    seconds: float | None = None  # since the trial got its slots; None if unknown
    handle: dict[str, Any] = dataclasses.field(default_factory=dict)  # by which the backend finds the trial

    def score(self, metric: str) -> float | None:
        return None if self.outcome is None else score(self.outcome, metric)

    def to_json(self) -> dict[str, Any]:
        return {
            "trial_id": self.trial_id,
            "description": self.description,
            "candidate": self.candidate.to_json(),
            "why": self.why,
            "seconds": self.seconds,
            "handle": self.handle,
            **({} if self.outcome is None else outcome_to_json(self.outcome)),
        }


def mean_of(many: Sequence[Measured]) -> Measured:
    """Return the mean of repeated measurements of one configuration.

    The result's ``half_width`` is the relative half-width of the mean's 95 % interval. It shrinks with the number of
    measurements and grows with their spread. The range from ``LOWEST_EXPECTED`` to ``HIGHEST_EXPECTED`` includes those of
    all measurements.
    """
    merge: dict[str, Callable[[list[float]], float]] = {LOWEST_EXPECTED: min, HIGHEST_EXPECTED: max}
    metrics = {
        name: known[0] if len(set(known)) == 1 else merge.get(name, statistics.fmean)(known)  # keeps integers
        for name in many[0].metrics
        if (known := [value for one in many if (value := one.value(name)) is not None])
    }
    widths = [one.value("half_width") or USUAL_HALF_WIDTH for one in many]
    times = [value for one in many if (value := one.value("latency"))]
    spread = 1.96 * statistics.stdev(times) / statistics.fmean(times) if len(times) > 1 else 0.0
    return Measured({**metrics, "half_width": max(statistics.fmean(widths), spread) / math.sqrt(len(many))})


def with_means(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials, with repeated measurements of a configuration merged.

    A merged trial is the first of the repeats, with mean metrics and summed seconds. Trials without a measurement stay as they
    are.
    """
    repeats: dict[Candidate, list[TrialResult]] = {}
    for trial in trials:
        if isinstance(trial.outcome, Measured):
            repeats.setdefault(trial.candidate, []).append(trial)
    found = []
    for trial in trials:
        many = repeats[trial.candidate] if isinstance(trial.outcome, Measured) else [trial]
        if many[0] is not trial:
            continue
        if len(many) > 1:
            outcome = mean_of([one.outcome for one in many if isinstance(one.outcome, Measured)])
            seconds = sum(one.seconds or 0.0 for one in many)
            why = f"{trial.why}; mean of {len(many)} measurements"
            trial = dataclasses.replace(trial, outcome=outcome, seconds=seconds, why=why)
        found.append(trial)
    return found


def best_of(trials: Sequence[TrialResult], metric: str) -> TrialResult | None:
    """Return the trial with the best metric; None if nothing was measured.

    Repeated measurements of a configuration count as one trial with their mean. A gain of at most 1 % (``TIE``) over the user's
    own configuration does not count: the trial of the user's own configuration is then returned.
    """
    scored = [(value, trial) for trial in with_means(trials) if (value := trial.score(metric)) is not None]
    if not scored:
        return None
    best_value, best = max(scored, key=lambda pair: (pair[0], -pair[1].trial_id))
    own = next(((value, trial) for value, trial in scored if trial.candidate.is_own), None)
    return own[1] if own is not None and relative_gain(best_value, own[0]) <= TIE else best


def own_of(trials: Sequence[TrialResult]) -> TrialResult | None:
    """Return the first trial of the user's own configuration; None if there is none."""
    return next((trial for trial in trials if trial.candidate.is_own), None)


def gain_over(best: TrialResult | None, own: TrialResult | None, metric: str) -> float | None:
    """Return the relative gain of ``best`` over ``own``; None if either is unmeasured."""
    after = None if best is None else best.score(metric)
    before = None if own is None else own.score(metric)
    return None if after is None or before is None else relative_gain(after, before)


def relative_gain(value: float, own: float) -> float:
    """Return the relative gain of score ``value`` over score ``own``; 0.1 is 10 %.

    A score (see :func:`score`) of a time is negative, because a shorter time is better.
    """
    return value / own - 1 if own > 0 else own / value - 1
