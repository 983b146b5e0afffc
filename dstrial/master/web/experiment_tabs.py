"""JSON routes for an experiment's tabs: rungs, checkpoints, config, code."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any

from dstrial.config.documents import read_yaml_text, yaml_text
from dstrial.config.experiment_config.submission import LABEL, config_values
from dstrial.config.secrets import masked, masked_json, masked_yaml
from dstrial.master.backends.model_definition import list_files, read_start, read_starts
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data
from dstrial.master.store import experiments, trials
from dstrial.master.store.database import Connection
from dstrial.master.store.views import overviews
from dstrial.master.store.views.overviews import Json
from dstrial.search.halving import brackets, rung_units

MAX_TEXT_BYTES = 2**20  # per file
_MAX_FILES = 20_000  # per listing
_MAX_VALUES = 5000  # config values per response
_MAX_LINES = 5000  # per diff, and per compared text
_MAX_CHANGED = 200  # files per diff
_MAX_ENTRIES = 1000  # trials listed per rung, best first

WITH_RUNGS = ("adaptive_asha", "async_halving")  # names of searchers that have rungs
_WORST = sys.float_info.max  # value that the searcher stores for a trial that failed at a rung


def _read_rungs(connection: Connection, experiment_id: int) -> Json:
    row = experiments.require(connection, experiment_id)
    config = json.loads(row.config)
    searcher = config["searcher"]
    # Another program runs a detached search; the searcher in its config is only a name.
    if row.unmanaged or row.searcher_type not in WITH_RUNGS:
        return {"brackets": []}
    snapshot = json.loads(row.searcher_snapshot or "{}")
    ids = {trial.request_id: trial.id for trial in trials.of_experiment(connection, experiment_id)}
    return {
        "metric": row.searcher_metric,
        "timeMetric": searcher["time_metric"],
        "divisor": searcher["divisor"],
        "brackets": rungs_of(
            searcher, snapshot.get("method", {}), frozenset(snapshot.get("closed", ())), ids
        ),
    }


def rungs_of(
    searcher: Mapping[str, Any], method: Mapping[str, Any], closed: frozenset[str], trials: Mapping[str, int]
) -> list[Json]:
    """Return an ASHA search's brackets as JSON, each with its rungs, lowest first.

    Each rung has ``units`` (its length in the time metric) and ``total`` (the number of trials that reached the rung).
    ``wentOn``, ``stopped``, ``finished`` and ``failed`` count these trials by outcome. ``underWay`` lists the trials that
    train towards the rung. ``entries`` lists the best trials with value and outcome.

    Args:
        searcher: the searcher section of the config.
        method: the saved state of the search method; empty before the first trial.
        closed: request ids of trials that have ended. The searcher names its trials by request ids.
        trials: request id -> trial id.
    """
    sizes = [one.num_rungs for one in brackets(searcher)]
    states = method.get("brackets", [])
    sign = 1.0 if searcher["smaller_is_better"] else -1.0
    units = [rung_units(size, float(searcher["divisor"]), int(searcher["max_time"])) for size in sizes]
    return [
        {"rungs": _rungs(times, state, sign, closed, trials)}
        for times, state in zip(units, [*states, *[{}] * len(sizes)], strict=False)
    ]


def _rungs(
    units: list[int], state: Mapping[str, Any], sign: float, closed: frozenset[str], trials: Mapping[str, int]
) -> list[Json]:
    rung_of: Mapping[str, int] = state.get("rung_of", {})
    stopped = frozenset(state.get("stopped", ()))
    found: list[Json] = []
    for idx, time in enumerate(units):
        entries = [
            {
                "trial": trials.get(request_id),
                "value": None if value == _WORST else sign * value,
                "outcome": _outcome(
                    idx, len(units) - 1, value, rung_of.get(request_id, 0), request_id in stopped
                ),
            }
            for value, request_id in (state["rungs"][idx] if state else ())
        ]
        under_way = [
            trials[request_id]
            for request_id, rung in rung_of.items()
            if rung == idx and request_id in trials and request_id not in stopped and request_id not in closed
        ]
        count = [entry["outcome"] for entry in entries].count
        found.append(
            {
                "units": time,
                "total": len(entries),
                "wentOn": count("went on"),
                "stopped": count("stopped"),
                "finished": count("finished"),
                "failed": count("failed"),
                "underWay": under_way[:_MAX_ENTRIES],
                "numUnderWay": len(under_way),
                "entries": entries[:_MAX_ENTRIES],
            }
        )
    return found


def _outcome(idx: int, top: int, value: float, reached: int, is_stopped: bool) -> str:
    """Return "went on", "failed", "finished" or "stopped" for a trial at rung ``idx``.

    "went on": the searcher did not stop the trial at this rung. "finished": the trial ended at the bracket's highest rung,
    ``top``. ``reached`` is the highest rung that the trial has reached. ``value`` is the metric's value, or ``_WORST`` if the
    trial failed at the rung.
    """
    if reached > idx or not is_stopped:
        return "went on"
    if value == _WORST:
        return "failed"
    return "finished" if idx == top else "stopped"


async def get_rungs(request: ApiRequest) -> Json:
    """Return the brackets and rungs of an ASHA search, with the trials in each rung."""
    return await request.services.read(_read_rungs, request.path_params["experiment_id"])


def _layouts(engines: str | None) -> list[Json]:
    found = json.loads(engines) if engines else []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


async def get_checkpoints(request: ApiRequest) -> Json:
    """Return an experiment's newest checkpoints; ``more`` tells if some are left out."""

    def read(connection: Connection) -> list[Json]:
        experiment_id = request.path_params["experiment_id"]
        experiments.require(connection, experiment_id)
        return overviews.checkpoints(connection, experiment_id)

    found = await request.services.read(read)
    limit = overviews.MAX_CHECKPOINTS
    shown = [{**row, "layouts": _layouts(row.pop("engines"))} for row in found[:limit]]
    return {"checkpoints": shown, "more": len(found) > limit}


async def get_config(request: ApiRequest) -> Json:
    """Return an experiment's submitted config, and its effective values with origins.

    The origin of a value is, for example, the submitted config, the template or the defaults.
    """
    services = request.services
    row = await services.read(experiments.require, request.path_params["experiment_id"])
    names = services.secret_names

    def explain() -> Json:
        template = masked(json.loads(row.template), names) if row.template else None
        effective = json.loads(masked_json(row.config, names))
        original = masked_yaml(row.original_config, names)
        values = config_values(effective, read_yaml_text(original, LABEL), template)
        rows = [{"key": one.key, "value": one.value, "origin": one.origin} for one in values[:_MAX_VALUES]]
        return {
            "original": as_data(original),
            "template": as_data(template),
            "values": as_data(rows),
            "more": len(values) > _MAX_VALUES,
        }

    return await services.check(explain)


def listed_files(tgz: bytes) -> Json:
    """List a model definition's files (tar.gz); ``more`` tells if some are left out."""
    files = list_files(tgz)
    return {
        "files": [{"path": file.path, "bytes": file.size} for file in files[:_MAX_FILES]],
        "more": len(files) > _MAX_FILES,
    }


def shown_file(tgz: bytes, path: str) -> Json:
    """Return a file of a model definition (tar.gz) as text, cut at ``MAX_TEXT_BYTES``.

    The text of a binary file is empty.
    """
    content, size = read_start(tgz, path, MAX_TEXT_BYTES)
    is_binary = b"\0" in content
    text = "" if is_binary else content.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "text": text, "isBinary": is_binary, "isCut": size > len(content)}


def code_differences(before: bytes, after: bytes) -> list[str]:
    """Return the lines of a unified diff of two model definitions (tar.gz)."""
    old, new = ({file.path: file.digest for file in list_files(tgz)} for tgz in (before, after))
    changed = sorted({path for path, _ in old.items() ^ new.items()})
    shown = frozenset(changed[:_MAX_CHANGED])
    old_starts, new_starts = (
        read_starts(tgz, shown & paths.keys(), MAX_TEXT_BYTES) for tgz, paths in ((before, old), (after, new))
    )
    found: list[str] = []
    for path in sorted(shown):
        old_name = f"a/{path}" if path in old else "/dev/null"
        new_name = f"b/{path}" if path in new else "/dev/null"
        texts = _lines_of(old_starts.get(path)), _lines_of(new_starts.get(path))
        found += list(difflib.unified_diff(texts[0], texts[1], old_name, new_name, lineterm="")) or [
            f"--- {old_name}",
            f"+++ {new_name}",
            "(they differ, but not in the text that is compared)",
        ]
    left_out = len(changed) - len(shown)
    return [*found, f"({left_out:,} more files differ)"] if left_out else found


def _lines_of(start: tuple[bytes, int] | None) -> list[str]:
    content = b"" if start is None or b"\0" in start[0] else start[0]
    return content.decode("utf-8", "replace").splitlines()[:_MAX_LINES]


async def get_difference(request: ApiRequest) -> Json:
    """Return a unified diff from experiment ``other`` to the experiment in the URL.

    Query parameter ``kind`` is "effective" (compare the effective configs) or "code" (compare the model definitions).
    """
    services, kind = request.services, request.query("kind")
    if kind not in ("effective", "code"):
        raise request.wrong_query("kind", "effective or code")
    ids = [request.query_int("other") or 0, request.path_params["experiment_id"]]
    rows = [await services.read(experiments.require, one) for one in ids]
    tgzs = [await services.read(experiments.model_definition, one) for one in ids] if kind == "code" else []

    def compare() -> list[str]:
        if tgzs:
            return code_differences(*tgzs)
        configs = [json.loads(masked_json(row.config, services.secret_names)) for row in rows]
        old, new = (yaml_text(config).splitlines() for config in configs)
        return list(difflib.unified_diff(old, new, "a/config", "b/config", lineterm=""))

    lines = await services.check(compare)
    return {"lines": as_data(lines[:_MAX_LINES]), "more": len(lines) > _MAX_LINES}


async def get_files(request: ApiRequest) -> Json:
    tgz = await request.services.read(experiments.model_definition, request.path_params["experiment_id"])
    return await request.services.check(lambda: listed_files(tgz))


async def get_file(request: ApiRequest) -> Json:
    path = request.query("path") or ""
    tgz = await request.services.read(experiments.model_definition, request.path_params["experiment_id"])
    found = await request.services.check(lambda: shown_file(tgz, path))
    return {**found, "text": as_data(found["text"])}


_ONE = "//page/experiments/{experiment_id:int}"
routes = [
    route("GET", f"{_ONE}/rungs", get_rungs, access=USER),
    route("GET", f"{_ONE}/checkpoints", get_checkpoints, access=USER),
    route("GET", f"{_ONE}/config", get_config, access=USER),
    route("GET", f"{_ONE}/difference", get_difference, access=USER),
    route("GET", f"{_ONE}/files", get_files, access=USER),
    route("GET", f"{_ONE}/file", get_file, access=USER),
]
