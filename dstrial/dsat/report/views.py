"""Texts, tables and charts of a report, for its page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.core.candidate import setting_text
from dstrial.dsat.report import formatting
from dstrial.dsat.report.charts import Point, scatter, stacks

Document = Mapping[str, Any]


def trial(document: Document, trial_id: int | None) -> Mapping[str, Any] | None:
    """Return the row of a trial; None if there is none."""
    return next((row for row in document["trials"] if row["trial_id"] == trial_id), None)


def headline(document: Document) -> str:
    best, own = trial(document, document["best"]), trial(document, document["own"])
    if best is None:
        return "Nothing could be measured."
    value = f"{formatting.amount(best['value'])} {document['unit']}"
    if best["is_own"]:
        return (
            f"Your own configuration is the best: {value}. Nothing that was measured is better by more than "
            f"{formatting.share(document['tie'])}."
        )
    if document["gain"] is None:
        state = "was not measured" if own is None else f"ended with: {own['state']}"
        return f"The best configuration reaches {value}. Your own {state}."
    doubt = (
        "" if document["is_gain_certain"] else " Their intervals overlap, so that the gain is not certain."
    )
    return (
        f"The best configuration reaches {value}, {formatting.share(document['gain'], signed=True)} over your own "
        f"({formatting.amount(own['value'] if own else 0.0)} {document['unit']}).{doubt}"
    )


def facts(document: Document) -> list[tuple[str, str]]:
    state = "finished" if document["is_finished"] else "not finished"
    found = [
        ("search", f"{document['method']}, {state}: {document['reason']}"),
        ("trials", f"{len(document['trials'])}, with {document['num_slots']} rank(s) each"),
    ]
    spent = sum(row["seconds"] or 0.0 for row in document["trials"])
    if spent:
        found.append(
            ("time in trials", formatting.seconds(spent) if spent < 120 else f"{spent / 60:.0f} min")
        )
    best = trial(document, document["best"])
    if best is not None and (told := formatting.rates(best.get("metrics") or {})):
        found.append(("samples/s of the best", told))
    own = trial(document, document["own"])
    if own is not None and own is not best and (told := formatting.rates(own.get("metrics") or {})):
        found.append(("samples/s of your own", told))
    for whose, row in (("the best", best), ("your own", None if own is best else own)):
        done = {} if row is None else row.get("metrics") or {}
        model, hardware = done.get("FLOPS_per_gpu"), done.get("hardware_FLOPS_per_gpu")
        if model and hardware:
            told = (
                f"{formatting.amount(model)} of the model, {formatting.amount(hardware)} with recomputation"
            )
            found.append((f"FLOP/s of {whose}, per device", told))
    model = document["model"]
    if "num_params" in model:
        found.append(("model", f"{formatting.amount(model['num_params'])} parameters"))
    if "activation_bytes_per_record" in model:
        found.append(("one record keeps", formatting.gibibytes(model["activation_bytes_per_record"])))
    if "device_memory_bytes" in model:
        found.append(("device memory", formatting.gibibytes(model["device_memory_bytes"])))
    return found


def trial_cells(document: Document, row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a trial in the table, as ``TRIAL_COLUMNS`` names them."""
    value = row["state"]
    if row["value"] is not None:
        within = "" if row["half_width"] is None else f" ± {formatting.share(row['half_width'])}"
        value = f"{formatting.amount(row['value'])}{within}"
    predicted = row["predicted"] or {}
    foreseen = ""
    if predicted.get("step_s") and row["step_s"]:
        foreseen = formatting.share(predicted["step_s"] / row["step_s"] - 1, signed=True)
    marks = {document["best"]: "best", document["own"]: "yours"}
    return [
        str(row["trial_id"]),
        marks.get(row["trial_id"], ""),
        value,
        "" if row["step_s"] is None else formatting.seconds(row["step_s"]),
        "" if row["memory_bytes"] is None else formatting.gibibytes(row["memory_bytes"]),
        foreseen,
        row["description"],
        row["why"],
    ]


TRIAL_COLUMNS = (
    "trial",
    "",
    "measured",
    "step",
    "memory",
    "predicted step",
    "configuration",
    "why it was measured",
)


def ordered(document: Document) -> list[Mapping[str, Any]]:
    """Return the trials, the best first, failures last."""
    sign = 1 if document["smaller_is_better"] else -1

    def rank(row: Mapping[str, Any]) -> tuple[bool, float, int]:
        return row["value"] is None, sign * (row["value"] or 0.0), row["trial_id"]

    return sorted(document["trials"], key=rank)


def needs(document: Document) -> list[str]:
    found = []
    for one in document["needs"]:
        whose = "the best configuration" if one["trial_id"] == document["best"] else "your own configuration"
        size, missing = one["micro_batch_size"], one["missing_bytes"]
        tried = "" if one["was_tried"] is None else f" (tried: {one['was_tried']})"
        if missing > 0:
            phase = f", at the peak of its {one['phase']} phase" if one.get("phase") else ""
            found.append(
                f"{whose} needs {formatting.gibibytes(missing)} more for micro batch {size}{phase}{tried}"
            )
        else:
            found.append(
                f"{whose} has {formatting.gibibytes(-missing)} to spare with micro batch {size}{tried}"
            )
    return found


def front_chart(document: Document) -> str:
    """Return throughput over memory with the configurations that none beats in both."""
    rows = [row for row in document["trials"] if row["throughput"] and row["memory_bytes"]]
    points = [
        Point(
            row["memory_bytes"] / 2**30,
            row["throughput"],
            _kind(document, row),
            f"trial {row['trial_id']}: {row['description']}",
            {"best": "best", "own": "yours"}.get(_kind(document, row), ""),
        )
        for row in rows
    ]
    front = [trial(document, trial_id) for trial_id in document["pareto"]]
    line = [(row["memory_bytes"] / 2**30, row["throughput"]) for row in front if row is not None]
    capacity = document["model"].get("device_memory_bytes")
    limit = None if capacity is None else (capacity / 2**30, "device memory")
    where = "of a device" if capacity is not None else "of rank 0"
    return scatter(points, x_label=f"memory {where}, GiB", y_label="samples/s", line=line, limit_x=limit)


def prediction_charts(document: Document) -> list[tuple[str, str]]:
    """Return (title, SVG) of predicted against measured time and memory, if any."""
    found = []
    per_s, time_unit = _time_scale(document)
    for title, name, factor, unit in (
        ("Step time", "step_s", per_s, time_unit),
        ("Memory", "memory_bytes", 2**-30, "GiB"),
    ):
        points = [
            Point(
                row["predicted"][name] * factor,
                row[name] * factor,
                _kind(document, row),
                f"trial {row['trial_id']}: {row['description']}",
            )
            for row in document["trials"]
            if row["predicted"] and row["predicted"].get(name) and row[name]
        ]
        if points and (name != "memory_bytes" or "device_memory_bytes" in document["model"]):
            chart = scatter(points, x_label=f"predicted, {unit}", y_label=f"measured, {unit}", is_square=True)
            found.append((title, chart))
    return found


def time_charts(document: Document) -> list[tuple[str, str]]:
    """Return (title, SVG) of a step's time, measured and as the prediction splits it."""
    found = []
    per_s, unit = _time_scale(document)
    for title, key in (
        ("As measured", "measured"),
        ("As predicted, with idle time as what is left", "explained"),
    ):
        rows = [
            (_name(document, one["trial_id"]), {part: value * per_s for part, value in one[key].items()})
            for one in document["step_time"]
            if one[key]
        ]
        if rows:
            found.append((title, stacks(rows, unit=unit)))
    return found


def sensitivity_rows(document: Document) -> list[tuple[str, str, Sequence[tuple[str, str, float]]]]:
    """Return (knob, effect, (value, words, share of best)) of every varied knob."""
    found: list[tuple[str, str, Sequence[tuple[str, str, float]]]] = []
    for one in document["sensitivity"]:
        values = [
            (
                setting_text(row["value"]),
                f"{formatting.share(-row['loss'], signed=True)}, {row['count']} trial(s)"
                if row["loss"] > 0
                else f"best, {row['count']} trial(s)",
                max(1.0 - row["loss"], 0.0),
            )
            for row in one["values"]
        ]
        found.append((formatting.knob(one["knob"]), formatting.share(one["effect"]), values))
    return found


def _time_scale(document: Document) -> tuple[float, str]:
    """Return the factor of seconds in charts, and the unit."""
    longest = max((row["step_s"] for row in document["trials"] if row["step_s"]), default=0.0)
    return (1.0, "s") if longest >= 2 else (1e3, "ms")


def _kind(document: Document, row: Mapping[str, Any]) -> str:
    if row["trial_id"] == document["best"]:
        return "best"
    return "own" if row["is_own"] else "other"


def _name(document: Document, trial_id: int) -> str:
    is_best, is_own = trial_id == document["best"], trial_id == document["own"]
    if is_best and is_own:
        return "yours, the best"
    return "the best" if is_best else "yours"
