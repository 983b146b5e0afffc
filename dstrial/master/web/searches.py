"""Routes of the web page's view of searches by dsat, the DeepSpeed autotuner.

A label of each experiment names the search. dsat writes its report into an experiment's notes: a short one during the search,
the full one at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import time_or_none
from dstrial.master.store.database import Connection
from dstrial.master.store.views import overviews
from dstrial.master.store.views.overviews import Json, LabelledExperiment

# Label of an experiment: the search's id, and a trial's number or the experiment's role.
_LABEL = re.compile(r"dsat-([0-9a-f]{8})-(?:(\d{1,9})|(search)|(results)|(full))$", re.ASCII)
# End of the name of an experiment that dsat has submitted.
_NAME = re.compile(r" \(dsat (?:trial \d+|search|results)\)$", re.ASCII)
_NOTES_BEGIN = "Report of a search of dsat (JSON; do not edit):\n"
# Fields of a dsat report's row that the page shows.
_ROW = (
    *("trial_id", "description", "is_own", "why", "seconds", "predicted", "failure", "experiment"),
    *("state", "value", "throughput", "step_s", "memory_bytes"),
)
# Fields of a dsat report that the page shows.
_FACTS = (
    *("name", "method", "metric", "unit", "smaller_is_better", "num_slots"),
    *("reason", "is_finished", "is_failure", "best", "own", "gain", "is_gain_certain"),
)
_ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


def search_of(label: str) -> str | None:
    """Return the id of the dsat search that a label of an experiment names, or None."""
    found = _LABEL.match(label)
    return None if found is None else found[1]


def document_of(notes: str, *, is_live: bool = False) -> Json | None:
    """Return the report of a dsat search from an experiment's notes, or None.

    If ``is_live``, return the short report of a running search, else the final report. None means that the report is missing
    or invalid.
    """
    if not notes.startswith(_NOTES_BEGIN):
        return None
    try:
        fields = json.loads(notes.removeprefix(_NOTES_BEGIN))
        found = fields["report"] if is_live else json.loads(fields["results"]["report.json"])
        rows = [row for row in found["trials"] if type(row["trial_id"]) is int and row["trial_id"] < 2**31]
        lists = {name: found.get(name) for name in ("notes", "pareto")}
        count = found.get("num_trials")
        return {
            **{name: found.get(name) for name in _FACTS},
            **{name: value if isinstance(value, list) else [] for name, value in lists.items()},
            # The report of a running search is short, and may be outdated if the search's process has died.
            "num_trials": count if isinstance(count, int) else len(rows),
            "told_s": float(found.get("told_s") or 0.0),
            "trials": [{name: row.get(name) for name in _ROW} for row in rows],
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # a user has edited the notes


def shown_rows(reported: Iterable[Json], experiments: Sequence[int], *, is_over: bool) -> list[Json]:
    """Return the rows of a dsat report as the page shows them.

    If the search has ended (``is_over``), the state "running" becomes "not measured". ``experiments`` are the ids of the
    search's experiments. Any other id in a row becomes None, because users can edit the notes that contain the report.
    """
    return [
        {
            **row,
            "experiment": row["experiment"] if row["experiment"] in experiments else None,
            "state": "not measured" if is_over and row["state"] == "running" else row["state"],
        }
        for row in reported
    ]


def is_over(rows: Iterable[LabelledExperiment]) -> bool:
    return all(row.state in _ENDED for row in rows)


def shown_state(rows: Sequence[LabelledExperiment], document: Mapping[str, Any] | None) -> str:
    """Return the state of a dsat search: RUNNING, COMPLETED, CANCELED or ERROR.

    ``rows`` are the search's experiments. If any of them has not ended, the state is RUNNING. Otherwise the report
    ``document`` determines the state or, without a report, the states of the experiments.
    """
    if not is_over(rows):
        return "RUNNING"
    if document is None:
        states = {row.state for row in rows}
        return next((state for state in ("COMPLETED", "ERROR") if state in states), "CANCELED")
    if document["is_failure"]:
        return "ERROR"
    return "COMPLETED" if document["is_finished"] else "CANCELED"


def _search_json(
    search_id: str, rows: Sequence[LabelledExperiment], document: Mapping[str, Any] | None
) -> Json:
    first = rows[0]
    ends = [row.end_us for row in rows if row.end_us is not None]
    method = re.match(r"dsat ([\w-]+):", first.description)
    return {
        "id": search_id,
        "name": _NAME.sub("", first.name),
        "method": method[1] if method else "",
        "user": first.username,
        "metric": first.searcher_metric,
        "smallerIsBetter": bool(first.smaller_is_better),
        "slots": first.slots_per_trial,
        "state": shown_state(rows, document),
        "experiments": [row.id for row in rows],
        "start": format_us(first.start_us),
        "end": time_or_none(max(ends)) if ends and is_over(rows) else None,
        "full": next((row.id for row in rows if row.label.endswith("-full")), None),
    }


def _experiments_by_search(rows: Sequence[LabelledExperiment]) -> dict[str, list[LabelledExperiment]]:
    found: dict[str, list[LabelledExperiment]] = {}
    for row in rows:
        search_id = search_of(row.label)
        if search_id is not None:
            found.setdefault(search_id, []).append(row)
    return found


async def get_searches(request: ApiRequest) -> Json:
    def read(connection: Connection) -> list[Json]:
        return [
            {
                # Reports are long: parse them for ended searches only, as running searches need none here.
                **_search_json(search_id, own, newest_document(own) if is_over(own) else None),
                "hasReport": any("report.json" in row.notes for row in own),
            }
            for search_id, own in _experiments_by_search(overviews.labelled(connection)).items()
        ]

    found = await request.services.read(read)
    return {"searches": sorted(found, key=lambda one: -one["experiments"][0])}


def newest_document(experiments: Iterable[LabelledExperiment]) -> Json | None:
    """Return the most complete report in the notes of a search's experiments, or None.

    If a search was interrupted and continued, some of its experiments have outdated reports.
    """
    documents = [document_of(row.notes, is_live=is_live) for row in experiments for is_live in (True, False)]
    return max(
        (one for one in documents if one is not None),
        key=lambda one: (one["num_trials"], one["is_finished"] is True, one["told_s"]),
        default=None,
    )


def _read_search(connection: Connection, search_id: str) -> Json:
    own = _experiments_by_search(overviews.labelled(connection, search_id)).get(search_id)
    if not own:
        raise RequestError(
            404, f"search {search_id[:80]!r} is not found; expected one that has experiments on this master."
        )
    document = newest_document(own)
    facts = _search_json(search_id, own, document)
    rows: list[Json] = []
    if document is not None:
        del document["num_trials"], document["told_s"]
        rows = shown_rows(document.pop("trials"), facts["experiments"], is_over=facts["state"] != "RUNNING")
    return {"search": facts, "report": document, "trials": rows}


async def get_search(request: ApiRequest) -> Json:
    return await request.services.read(_read_search, request.path_params["search_id"])


routes = [
    route("GET", "//page/searches", get_searches, access=USER),
    route("GET", "//page/searches/{search_id}", get_search, access=USER),
]
