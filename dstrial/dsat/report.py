"""The report of a search: as JSON values, as Markdown, and as lines on a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.core.candidate import setting_text
from dstrial.dsat.core.journal import BEST_NAMES, SearchRecord
from dstrial.dsat.core.outcome import (
    HIGHEST_EXPECTED,
    LOWEST_EXPECTED,
    TIE,
    Failure,
    Measured,
    TrialResult,
    best_of,
    gain_over,
    outcome_to_json,
    own_of,
    relative_gain,
    smaller_is_better,
    with_means,
)
from dstrial.dsat.space import Space
from dstrial.file_writes import replace_file
from dstrial.local.json_files import write_json_atomically
from dstrial.visible_text import size_text

Document = Mapping[str, Any]  # a report as JSON values

_FORMAT = 1  # version of the report's fields
REPORT_NAMES = ("report.json", "report.md")
"""Names of the JSON and the Markdown report in the directory of a search."""
# Metric that a search can optimize -> its unit.
_UNITS = {
    "throughput": "samples/s",
    "FLOPS_per_gpu": "FLOP/s per device",
    "latency": "µs",
    "forward": "µs",
    "backward": "µs",
}

# Fields of a live report. The report is sent with every result, so it is small. Other users may read it, so it has no configs.
_LIVE_FACTS = (
    *("format", "name", "method", "metric", "unit", "smaller_is_better", "reason", "is_finished"),
    *("is_failure", "num_slots", "num_trials", "notes", "best", "own", "gain", "is_gain_certain", "pareto"),
)
_LIVE_ROW = (
    *("trial_id", "description", "is_own", "state", "why", "seconds", "value", "throughput", "step_s"),
    *("memory_bytes", "predicted", "experiment"),
)
_MAX_LIVE_ROWS = 200  # newest trials of a live report; the best, own and Pareto-optimal trials are added
_LONGEST_LIVE_TEXT = 500  # characters of a failure's message
# Metric that describes the model or the device -> its name in the Markdown report.
_MODEL = {
    "num_params": "parameters of the model",
    "activation_bytes_per_record": "activations of a record",
    "device_memory_bytes": "device memory",
}
# Headings of the table of all trials in the Markdown report.
_COLUMNS = (
    "trial",
    "",
    "measured",
    "step",
    "memory",
    "predicted step",
    "configuration",
    "why it was measured",
)

# Metric -> what it means, for texts with both throughputs.
_RATES = {
    "end_to_end_throughput": "end to end (all steps, with the data loader)",
    "throughput": "by the median step",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))  # (least number, SI prefix)


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFacts:
    """The content of a search's report other than the results of its trials."""

    name: str
    method: str
    metric: str
    reason: str  # why the search ended, or the signal that interrupted it
    is_finished: bool
    num_slots: int  # number of ranks of each trial
    # Trial id -> what was predicted before the trial ran.
    forecasts: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines for the user
    is_failure: bool = False  # nothing could be measured


def write_report(
    directory: Path, facts: SearchFacts, space: Space, trials: Sequence[TrialResult]
) -> dict[str, Any]:
    """Write ``report.json`` and ``report.md``; return the content of the former."""
    document = report_document(facts, space, trials)
    write_json_atomically(directory / REPORT_NAMES[0], document)
    replace_file(directory / REPORT_NAMES[1], "\n".join(markdown(document)) + "\n", sync=False)
    return document


def report_document(facts: SearchFacts, space: Space, trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the report of a search as JSON values; trials may still be running.

    Repeated measurements of a configuration are merged into one row, which has their mean.
    """
    metric, num_trials, trials = facts.metric, len(trials), with_means(trials)
    best, own = best_of(trials, metric), own_of(trials)
    rows = [_row(trial, metric, facts.forecasts.get(trial.trial_id)) for trial in trials]
    measured = [trial.outcome for trial in trials if isinstance(trial.outcome, Measured)]
    model = {name: one.metrics[name] for one in measured[:1] for name in _MODEL if name in one.metrics}
    return {
        "format": _FORMAT,
        "name": facts.name,
        "method": facts.method,
        "metric": metric,
        "unit": _UNITS[metric],
        "smaller_is_better": smaller_is_better(metric),
        "reason": facts.reason,
        "is_finished": facts.is_finished,
        "is_failure": facts.is_failure,
        "num_slots": facts.num_slots,
        "num_trials": num_trials,
        "notes": list(facts.notes),
        "model": model,
        "best": None if best is None else best.trial_id,
        "own": None if own is None else own.trial_id,
        "gain": gain_over(best, own, metric),
        "is_gain_certain": _is_certain(best, own, metric),
        "best_config": None if best is None else space.config(best.candidate),
        "pareto": pareto(rows),
        "sensitivity": [] if best is None else _sensitivity(trials, best, space, metric),
        "trials": rows,
    }


def live_document(document: Document) -> dict[str, Any]:
    """Return the part of a report that is shown while the search runs.

    This part has no configs, because they may contain secrets. It has the newest 200 trials (``_MAX_LIVE_ROWS``), the best
    trial, the Pareto-optimal trials, and the trial of the user's own configuration.
    """
    kept = {*document["pareto"], document["best"], document["own"]}
    newest = document["trials"][-_MAX_LIVE_ROWS:]
    older = [row for row in document["trials"][: -len(newest) or None] if row["trial_id"] in kept]
    rows = []
    for row in (*older, *newest):
        found = {name: row[name] for name in _LIVE_ROW if row[name] is not None}
        if row.get("failure") is not None:
            found["failure"] = {"message": row["failure"]["message"][:_LONGEST_LIVE_TEXT]}
        rows.append(found)
    return {**{name: document[name] for name in _LIVE_FACTS}, "trials": rows}


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids of the Pareto-optimal trials: high throughput, low memory.

    ``rows`` are the entry ``trials`` of the report. The ids are sorted by ascending memory. Trials without both measurements
    are left out.
    """
    front: list[int] = []
    most = 0.0
    known = [row for row in rows if row["memory_bytes"] and row["throughput"]]
    for row in sorted(known, key=lambda each: (each["memory_bytes"], -each["throughput"])):
        if row["throughput"] > most:
            most = row["throughput"]
            front.append(row["trial_id"])
    return front


def memory_bytes(measured: Measured) -> float | None:
    """Return a trial's peak memory in bytes; None if no peak was measured.

    The first measured value counts: bytes reserved by the allocator, bytes in tensors, host memory of the process.
    """
    for name in ("peak_reserved_bytes", "peak_memory_bytes", "host_peak_memory_bytes"):
        if (value := measured.value(name)) is not None:
            return value
    return None


def _row(trial: TrialResult, metric: str, forecast: Mapping[str, Any] | None) -> dict[str, Any]:
    outcome, batch = trial.outcome, trial.candidate.batch
    measured = outcome if isinstance(outcome, Measured) else Measured({})
    latency = measured.value("latency")
    return {
        "trial_id": trial.trial_id,
        "description": trial.description,
        "is_own": trial.candidate.is_own,
        "stage": trial.candidate.stage,
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "train_batch_size": batch.train_batch_size,
        "settings": dict(trial.candidate.settings),
        "why": trial.why,
        "seconds": trial.seconds,
        "experiment": trial.handle.get("experiment_id"),
        "state": outcome.kind.value if isinstance(outcome, Failure) else "measured" if outcome else "running",
        "value": measured.value(metric),
        "half_width": measured.value("half_width"),
        "throughput": measured.value("throughput"),
        "step_s": None if latency is None else latency * 1e-6,
        "memory_bytes": memory_bytes(measured),
        "predicted": None if forecast is None else dict(forecast),
        **({} if outcome is None else outcome_to_json(outcome)),
    }


def _is_certain(best: TrialResult | None, own: TrialResult | None, metric: str) -> bool:
    """Return whether the gain of ``best`` over ``own`` exceeds the measurement error.

    The error is the sum of the half-widths of both confidence intervals; an unmeasured half-width counts as 0.
    """
    gain = gain_over(best, own, metric)
    outcomes = [trial.outcome for trial in (best, own) if trial is not None]
    widths = [one.value("half_width") or 0.0 for one in outcomes if isinstance(one, Measured)]
    return gain is not None and gain > sum(widths)


def _sensitivity(
    trials: Sequence[TrialResult], best: TrialResult, space: Space, metric: str
) -> list[dict[str, Any]]:
    """Return one row per setting of which several values were measured.

    A row has the keys ``knob`` (the setting), ``values`` and ``effect``. Each value has a ``loss``: the relative gain of
    ``best`` over the best trial with this value. ``effect`` is the largest minus the smallest loss; rows are sorted by
    descending effect. Settings that were changed together are not separated.
    """
    top = best.score(metric)
    assert top is not None
    scores: dict[str, dict[Any, list[float]]] = {}
    for trial in trials:
        if (value := trial.score(metric)) is not None:
            for name, setting in _effective_settings(trial, space).items():
                scores.setdefault(name, {}).setdefault(setting, []).append(value)
    found = []
    for name, values in scores.items():
        rows: list[dict[str, Any]] = [
            {
                "value": "default" if value is None else value,
                "loss": -relative_gain(max(of_value), top),
                "count": len(of_value),
            }
            for value, of_value in values.items()
        ]
        rows.sort(key=lambda row: row["loss"])
        if len(rows) > 1:
            found.append({"knob": name, "effect": rows[-1]["loss"] - rows[0]["loss"], "values": rows})
    return sorted(found, key=lambda row: -row["effect"])


def _effective_settings(trial: TrialResult, space: Space) -> dict[str, Any]:
    candidate = trial.candidate
    settings: dict[str, Any] = {
        "ZeRO stage": candidate.stage,
        "micro batch": candidate.batch.micro_batch_size,
    }
    for knob in space.knobs(candidate.stage):
        value = space.value(candidate, knob.path)
        settings[knob.path] = "none" if value is None and knob.path.endswith(".device") else value
    return settings


# ---- Markdown --------------------------------------------------------------------------------


def markdown(document: Document) -> Iterator[str]:
    """Yield the Markdown text of a report in pieces of one or more lines."""
    yield f"# DeepSpeed configuration of {_cell(document['name'])}"
    yield f"\n{headline(document)}\n"
    yield from _table(("", ""), _facts(document))
    yield from (f"- {_cell(note)}" for note in document["notes"])
    best = _trial(document, document["best"])
    if best is not None:
        yield f"\n## The best: {_cell(best['description'])}\n\n```json"
        yield f"{json.dumps(document['best_config'], indent=2)}\n```"
    if document["sensitivity"]:
        yield "\n## What each knob was worth\n"
        yield from _table(("knob", "up to", "value", "the best with it"), _knobs(document))
    failures = [row for row in document["trials"] if row.get("failure") is not None]
    if failures:
        yield "\n## Failures\n"
        rows = [(str(row["trial_id"]), row["state"], row["failure"]["message"]) for row in failures]
        yield from _table(("trial", "kind", "message"), rows)
    yield "\n## All trials\n"
    sign = 1 if document["smaller_is_better"] else -1
    ordered = sorted(
        document["trials"],
        key=lambda row: (row["value"] is None, sign * (row["value"] or 0.0), row["trial_id"]),
    )
    yield from _table(_COLUMNS, [_cells(document, row) for row in ordered])
    if document["pareto"]:
        numbers = ", ".join(map(str, document["pareto"]))
        yield f"\nNo other configuration beats these trials in both throughput and memory: {numbers}."


def headline(document: Document) -> str:
    """Return the report's first sentences: best value, gain over the user's config."""
    best, own = _trial(document, document["best"]), _trial(document, document["own"])
    if best is None:
        return "Nothing could be measured."
    value = f"{_amount(best['value'])} {document['unit']}"
    if best["is_own"]:
        return (
            f"Your own configuration is the best: {value}. Nothing that was measured is better by more than "
            f"{_percent(TIE)}."
        )
    if document["gain"] is None:
        state = "was not measured" if own is None else f"ended with: {own['state']}"
        return f"The best configuration reaches {value}. Your own {state}."
    doubt = (
        "" if document["is_gain_certain"] else " Their intervals overlap, so that the gain is not certain."
    )
    return (
        f"The best configuration reaches {value}, {_percent(document['gain'], signed=True)} over your own "
        f"({_amount(own['value'] if own else 0.0)} {document['unit']}).{doubt}"
    )


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    state = "finished" if document["is_finished"] else "not finished"
    yield "search", f"{document['method']}, {state}: {document['reason']}"
    yield "trials", f"{document['num_trials']}, with {document['num_slots']} rank(s) each"
    spent = sum(row["seconds"] or 0.0 for row in document["trials"])
    yield "time in trials", format_duration(spent)
    best, own = _trial(document, document["best"]), _trial(document, document["own"])
    for whose, row in (("the best", best), ("your own", None if own is best else own)):
        if row is not None and (rates := _rates(row.get("metrics") or {})):
            yield f"samples/s of {whose}", rates
    for name, value in document["model"].items():
        yield _MODEL[name], _amount(value) if name == "num_params" else size_text(value)


def _knobs(document: Document) -> Iterator[tuple[str, str, str, str]]:
    for one in document["sensitivity"]:
        for row in one["values"]:
            loss = _percent(-row["loss"], signed=True) if row["loss"] > 0 else "best"
            name = one["knob"].removeprefix("zero_optimization.")
            trials = f"{loss}, {row['count']} trial(s)"
            yield name, _percent(one["effect"]), setting_text(row["value"]), trials


def _trial(document: Document, trial_id: int | None) -> Mapping[str, Any] | None:
    return next((row for row in document["trials"] if row["trial_id"] == trial_id), None)


def _cells(document: Document, row: Mapping[str, Any]) -> list[str]:
    value = row["state"]
    if row["value"] is not None:
        within = "" if row["half_width"] is None else f" ± {_percent(row['half_width'])}"
        value = f"{_amount(row['value'])}{within}"
    step_s = (row["predicted"] or {}).get("step_s")
    error = step_s / row["step_s"] - 1 if step_s and row["step_s"] else None
    marks = {document["best"]: "best", document["own"]: "yours"}
    return [
        str(row["trial_id"]),
        marks.get(row["trial_id"], ""),
        value,
        "" if row["step_s"] is None else _seconds(row["step_s"]),
        "" if row["memory_bytes"] is None else size_text(row["memory_bytes"]),
        "" if error is None else _percent(error, signed=True),
        row["description"],
        row["why"],
    ]


def _table(columns: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- lines on a terminal ----------------------------------------------------------------------


def summary(
    record: SearchRecord, trials: Sequence[TrialResult], metric: str, *, reason: str, is_finished: bool
) -> str:
    """Return the text printed when a search ends: trial table, best trial, file paths."""
    trials = with_means(trials)
    best = best_of(trials, metric)
    state = "finished" if is_finished else "not finished"
    lines = [*_trial_table(trials, metric), "", f"search:        {state} ({reason})"]
    if best is None:
        lines.append("best:          nothing was measured")
    else:
        value = _amount(abs(best.score(metric) or 0.0))
        lines.append(f"best:          trial {best.trial_id}: {best.description}")
        lines.append(f"{metric + ':':<15}{value}{_over_own(trials, best, metric)}")
        if isinstance(best.outcome, Measured) and (rates := _rates(best.outcome.metrics)):
            lines.append(f"samples/s:     {rates}")
        for title, name in zip(("config:", "metrics:", "experiment:"), BEST_NAMES, strict=True):
            lines.append(f"{title:<15}{record.path / name}")
    lines.append(f"all trials:    {record.path / 'trials.json'}")
    lines.append(f"report:        {record.path / 'report.md'}")
    failures = [trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failure)]
    if is_finished and failures and (best is None or any(kind.ends_search for kind in failures)):
        lines.append("to begin anew: correct what failed, and pass --fresh")
    if not is_finished:
        lines.append("to go on:      the same command, without --fresh")
    return "\n".join(lines) + "\n"


def ended_line(trial: TrialResult, metric: str) -> str:
    """Return the line to print when a trial has ended: its error, or its metric."""
    if isinstance(trial.outcome, Failure):
        return f"trial {trial.trial_id} failed ({trial.outcome.kind.value}): {trial.outcome.message}"
    value = None if trial.outcome is None else trial.outcome.value(metric)
    half_width = None if trial.outcome is None else trial.outcome.value("half_width")
    shown = "nothing" if value is None else _amount(value)
    within = "" if half_width is None else f" ± {half_width:.1%}"
    return f"trial {trial.trial_id} measured {metric} {shown}{within}"


def _trial_table(trials: Sequence[TrialResult], metric: str) -> list[str]:

    def rank(trial: TrialResult) -> tuple[float, int]:
        value = trial.score(metric)
        return (float("inf") if value is None else -value), trial.trial_id

    rows = [("trial", metric, "time", "why", "configuration")]
    for trial in sorted(trials, key=rank):
        took = "" if trial.seconds is None else format_duration(trial.seconds)
        rows.append((str(trial.trial_id), _value(trial, metric), took, trial.why, trial.description))
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def _value(trial: TrialResult, metric: str) -> str:
    if trial.outcome is None:
        return "not finished"
    if isinstance(trial.outcome, Failure):
        phase = trial.outcome.phase
        return f"{trial.outcome.kind.value} in {phase}" if phase else trial.outcome.kind.value
    value = trial.outcome.value(metric)
    return "not measured" if value is None else _amount(value)


def _over_own(trials: Sequence[TrialResult], best: TrialResult, metric: str) -> str:
    own = own_of(trials)
    if own is None or own.outcome is None:
        return ""
    if best.candidate.is_own:
        return " (your own configuration)"
    gain = gain_over(best, own, metric)
    if gain is None:
        return " (your own configuration could not be measured)"
    return f" ({gain:+.1%} over your own configuration)"


# ---- numbers as text --------------------------------------------------------------------------


def _amount(value: float) -> str:
    """Format a number with four significant digits and an SI prefix: ``1.234 G``."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / (1e3 if prefix == 'k' else size):.4g} {prefix}"
    return f"{value:.4g}"


def _seconds(value: float) -> str:
    """Format seconds in s, ms or µs with three significant digits: ``1.23 ms``."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _percent(value: float, *, signed: bool = False) -> str:
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def format_duration(seconds: float) -> str:
    """Format seconds as ``1h05m``, ``3m20s`` or ``12s``."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"


def _rates(metrics: Mapping[str, float]) -> str:
    """Format measured and expected throughput, with commas; "" if there are none."""
    texts = [f"{_amount(metrics[name])} {meaning}" for name, meaning in _RATES.items() if metrics.get(name)]
    if LOWEST_EXPECTED in metrics:
        low, high = (_amount(metrics[name]) for name in (LOWEST_EXPECTED, HIGHEST_EXPECTED))
        texts.append(f"expect {low} to {high} in training")
    return ", ".join(texts)
