"""Tables of experiments and runs: what is found, in which order, and what columns and ranges there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

from dstrial.master.store.reports import metrics

pytestmark = pytest.mark.process
EXPERIMENTS, RUNS = bindings.v1TableType.EXPERIMENT, bindings.v1TableType.RUN
HYPERPARAMETERS = {
    "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
    "layers": {"depth": {"type": "categorical", "vals": [2, 4]}, "kind": {"type": "const", "val": "wide"}},
    "mixed": {"type": "categorical", "vals": [1, "x"]},
    "api_key": {"type": "const", "val": "hunter2"},
}


def session_of(master: Master, username: str = "determined") -> api.Session:
    return api.Session(master.address, username, master.tokens[username], None)


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    """Experiments 1 (a search of rates, ended, best loss 0.25), 2 (active, loss 1), 3 (paused, archived, other project)."""

    def write(tx: Any) -> None:
        config = {"hyperparameters": HYPERPARAMETERS, "searcher": {"name": "random", "metric": "loss"}}
        tx.execute(
            "UPDATE experiments SET name = 'rates', state = 'COMPLETED', config = ?, labels = '[\"a\", \"b\"]', "
            "start_us = 1000000, end_us = 61000000, searcher_type = 'random' WHERE id = 1",
            (json.dumps(config),),
        )
        tx.execute(
            "UPDATE experiments SET labels = '[\"b\"]', parent_id = 1, description = 'fork' WHERE id = 2"
        )
        tx.execute(
            "UPDATE trials SET metadata = ?, hparams = ? WHERE id = 1",
            (
                json.dumps({"note": "n", "place": {"rack": 3}, "tags": ["x"]}),
                json.dumps({"lr": 0.1, "layers": {"depth": 2, "kind": "wide"}, "api_key": "hunter2"}),
            ),
        )
        for trial_id, loss in ((1, 0.25), (2, 1.0)):
            for group, values in (
                ("training", {"loss": loss * 2, "note": "text"}),
                ("validation", {"loss": loss, "a.b": loss}),
                ("own", {"rate": "NaN" if trial_id == 1 else 5}),
            ):
                metrics.add_report(
                    tx, trial_id=trial_id, run_id=1, group=group, steps=1, end_us=1, metrics=values
                )
        tx.execute(
            "INSERT INTO projects (id, workspace_id, name, key, owner_id, created_us) VALUES (2, 1, 'p', 'P', 2, 0)"
        )
        tx.execute(
            "INSERT INTO experiments (id, job_id, state, config, original_config, name, owner_id, searcher_type, "
            "searcher_metric, smaller_is_better, slots_per_trial, queue_position, start_us, archived, project_id) "
            "VALUES (3, 'job-3', 'PAUSED', '{}', 'name: x', 'old', 1, 'single', 'loss', 1, 1, 3.0, 1, 1, 2)"
        )

    fresh_master.services.database.write(write)
    return session_of(fresh_master)


def field(name: str, operator: str, value: Any) -> dict[str, Any]:
    return {"kind": "field", "columnName": name, "operator": operator, "value": value}


def group(conjunction: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "group", "conjunction": conjunction, "children": list(children)}


def search(
    session: api.Session, tree: dict[str, Any] | None = None, shows_archived: bool = False, **fields: Any
) -> list[int]:
    text = None if tree is None else json.dumps({"filterGroup": tree, "showArchived": shows_archived})
    body = bindings.v1SearchExperimentsRequest(filter=text, **fields)
    return [one.experiment.id for one in bindings.post_SearchExperiments(session, body=body).experiments]


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    (group("and"), [1, 2]),
    (group("and", field("name", "contains", "RAT")), [1]),
    (group("or", field("id", "=", 2), field("tags", "=", "a")), [1, 2]),
    (group("and", field("tags", "notContains", "a")), [2]),
    (group("and", field("state", "=", "completed")), [1]),
    (group("and", field("duration", "=", 60)), [1]),
    (group("and", field("forkedFrom", "isEmpty", None)), [1]),
    (group("and", field("searcherMetricsVal", "<=", 0.25)), [1]),
    (group("and", field("validation.a.b.max", ">", 0.5)), [2]),
    (group("and", field("training.note.last", "=", "text")), [1, 2]),
    (group("and", field("own.rate.last", ">", 1)), [2]),
    (group("and", field("hp.lr", "<", 0.01)), [1]),
    (group("and", field("hp.layers.depth", "=", 4)), [1]),
    (group("and", field("hp.layers.kind", "contains", "id")), [1]),
    (group("and", field("hp.lr", "=", 0.1)), [1, 2]),
    (group("and", field("hp.nothing", "isEmpty", None), field("numTrials", "=", 1)), [1, 2]),
    (group("and", field("hp.api_key", "contains", "hunter")), []),
    (group("and", field("user", "=", "determined"), field("resourcePool", "=", "default")), [1, 2]),
]


def test_experiments_are_found_by_filter(session: api.Session) -> None:
    assert [search(session, tree) for tree, _ in FILTERS] == [found for _, found in FILTERS]
    assert search(session, group("and"), shows_archived=True) == [1, 2, 3]
    assert search(session) == [1, 2]


def test_experiments_are_ordered_paged_and_of_a_project(session: api.Session) -> None:
    assert search(session, sort="searcherMetricsVal=desc") == [2, 1]
    assert search(session, sort="validation.loss.last=asc,id=desc") == [1, 2]
    assert search(session, sort="hp.lr=desc,id=desc") in ([1, 2], [2, 1])
    assert search(session, projectId=2) == []
    assert search(session, group("and"), shows_archived=True, projectId=2) == [3]
    body = bindings.v1SearchExperimentsRequest(sort="id=desc", limit=1, offset=1)
    answer = bindings.post_SearchExperiments(session, body=body)
    assert [one.experiment.id for one in answer.experiments] == [1]
    assert answer.pagination.to_json(True) == {
        **{"offset": 1, "limit": 1, "startIndex": 1, "endIndex": 2, "total": 2}
    }


def test_an_experiment_comes_with_its_best_trial_and_without_its_secrets(session: api.Session) -> None:
    body = bindings.v1SearchExperimentsRequest(sort="id=asc")
    answer = bindings.post_SearchExperiments(session, body=body)
    (first, second) = answer.experiments
    assert first.bestTrial is not None
    assert second.bestTrial is not None
    assert (first.bestTrial.id, first.bestTrial.searcherMetricValue) == (1, 0.25)
    assert (second.bestTrial.id, second.bestTrial.searcherMetricValue) == (2, 1.0)
    assert first.experiment.projectName == "Uncategorized"
    assert "hunter2" not in json.dumps(answer.to_json(True))


@pytest.mark.parametrize(
    "body",
    [
        {"filter": "{"},
        {"filter": "[]"},
        {"filter": json.dumps({"filterGroup": field("nowhere", "=", 1)})},
        {"filter": json.dumps({"filterGroup": field("metadata.x", "~", 1)})},
        {"filter": json.dumps({"filterGroup": group("xor")})},
        {"sort": "id"},
        {"sort": "nowhere=asc"},
        {"limit": -3},
        {"projectId": "x"},
        {"filter": 3},
        {"filter": json.dumps({"filterGroup": {**group("and"), "children": 5}})},
        {"filter": json.dumps({"filterGroup": group("or", *[field("name", "=", "x")] * 201)})},
        {"sort": ",".join(["hp.lr=asc"] * 21)},
    ],
)
def test_a_search_that_makes_no_sense_is_refused(served: Master, body: dict[str, Any]) -> None:
    answer = served.send("POST", "/api/v1/experiments-search", body, token="determined")
    assert answer.status == 400, answer.content


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "experiments-search"),
        ("GET", "projects/1/columns"),
        ("GET", "projects/1/experiments/metric-ranges"),
        ("GET", "experiment/labels"),
    ],
)
def test_tables_are_open_to_users_only(served: Master, method: str, path: str) -> None:
    assert served.send(method, f"/api/v1/{path}", {}).status == 401
    assert served.send(method, f"/api/v1/{path}", {}, token="trial-1").status == 403
    assert served.send(method, f"/api/v1/{path}", {}, token="other").status == 200


def test_a_project_that_is_not_there_has_no_table(served: Master) -> None:
    assert served.get("/api/v1/projects/99/columns").status == 404
    assert served.get("/api/v1/projects/99/experiments/metric-ranges").status == 404
    assert served.get("/api/v1/experiment/labels?projectId=99").status == 404
    assert (
        served.send("POST", "/api/v1/experiments-search", {"projectId": 99}, token="determined").status == 404
    )
    assert served.get("/api/v1/projects/1/columns?tableType=OTHER").status == 400
    assert served.get("/api/v1/projects/x/experiments/metric-ranges").status == 400
    assert served.get("/api/v1/experiment/labels?projectId=x").status == 400


def columns(
    session: api.Session, kind: bindings.v1TableType, project_id: int = 1
) -> dict[str, tuple[str, str]]:
    found = bindings.get_GetProjectColumns(session, id=project_id, tableType=kind).columns
    return {
        one.column: (
            one.location.value.removeprefix("LOCATION_TYPE_"),
            one.type.value.removeprefix("COLUMN_TYPE_"),
        )
        for one in found
    }


def test_the_columns_of_experiments_are_their_own_hyperparameters_and_metrics(session: api.Session) -> None:
    found = columns(session, EXPERIMENTS)
    assert list(found)[:3] == ["id", "name", "description"]
    assert found["startTime"] == ("EXPERIMENT", "DATE")
    assert {name: place for name, place in found.items() if name.startswith("hp.")} == {
        "hp.api_key": ("HYPERPARAMETERS", "TEXT"),
        "hp.layers.depth": ("HYPERPARAMETERS", "NUMBER"),
        "hp.layers.kind": ("HYPERPARAMETERS", "TEXT"),
        "hp.lr": ("HYPERPARAMETERS", "NUMBER"),
        "hp.mixed": ("HYPERPARAMETERS", "UNSPECIFIED"),
    }
    numbers = ("last", "max", "mean", "min")
    assert {name: place for name, place in found.items() if name.partition(".")[0] in ("own", "training", "validation")} == {
        **{f"own.rate.{one}": ("CUSTOM_METRIC", "NUMBER") for one in numbers},
        **{f"training.loss.{one}": ("TRAINING", "NUMBER") for one in numbers},
        "training.note.last": ("TRAINING", "UNSPECIFIED"),
        **{f"validation.a.b.{one}": ("VALIDATIONS", "NUMBER") for one in numbers},
        **{f"validation.loss.{one}": ("VALIDATIONS", "NUMBER") for one in numbers},
    }  # fmt: skip
    assert not [name for name in columns(session, EXPERIMENTS, 2) if "." in name]


def test_the_columns_of_runs_have_their_metadata_besides(session: api.Session) -> None:
    found = columns(session, RUNS)
    assert (found["id"], found["experimentName"]) == (("RUN", "NUMBER"), ("EXPERIMENT", "TEXT"))
    assert found["hp.layers.depth"] == ("RUN_HYPERPARAMETERS", "NUMBER")
    assert {name: place for name, place in found.items() if name.startswith("metadata.")} == {
        "metadata.note": ("RUN_METADATA", "TEXT"),
        "metadata.place.rack": ("RUN_METADATA", "NUMBER"),
        "metadata.tags": ("RUN_METADATA", "ARRAY"),
    }
    assert found["training.loss.min"] == ("TRAINING", "NUMBER")


def _experiments(session: api.Session, text: str, sort: str) -> int:
    body = bindings.v1SearchExperimentsRequest(filter=text, sort=sort)
    return len(bindings.post_SearchExperiments(session, body=body).experiments)


def _runs(session: api.Session, text: str, sort: str) -> int:
    body = bindings.v1SearchRunsRequest(filter=text, sort=sort)
    return len(bindings.post_SearchRuns(session, body=body).runs)


def test_a_field_of_a_filter_has_no_children_whatever_it_says(served: Master) -> None:
    body = {"filter": json.dumps({"filterGroup": {**field("name", "=", "x"), "children": 5}})}
    assert served.send("POST", "/api/v1/experiments-search", body, token="determined").status == 200


@pytest.mark.parametrize(("kind", "ask"), [(EXPERIMENTS, _experiments), (RUNS, _runs)])
def test_every_column_filters_and_orders(
    session: api.Session, kind: bindings.v1TableType, ask: Callable[[api.Session, str, str], int]
) -> None:
    for name in columns(session, kind):
        known, unknown = (
            json.dumps({"filterGroup": group("and", field(name, operator, None)), "showArchived": True})
            for operator in ("notEmpty", "isEmpty")
        )
        total = {EXPERIMENTS: 3, RUNS: 2}[kind]
        assert ask(session, known, f"{name}=asc") + ask(session, unknown, f"{name}=desc") == total, name


def test_many_metrics_have_columns_up_to_a_bound(session: api.Session, fresh_master: Master) -> None:
    def write(tx: Any) -> None:
        tx.executemany(
            'INSERT INTO metric_summaries VALUES (1, \'many\', ?, \'{"type": "number", "last": 1}\')',
            [(f"m{idx:05}",) for idx in range(10_050)],
        )

    fresh_master.services.database.write(write)
    found = [name for name in columns(session, EXPERIMENTS) if name.startswith("many.")]
    assert len(found) == 4 * 10_000


def test_ranges_are_those_of_the_best_trials(session: api.Session, fresh_master: Master) -> None:
    def ranges() -> dict[str, tuple[float, float]]:
        found = bindings.get_GetProjectNumericMetricsRange(session, id=1).ranges or []
        return {one.metricsName: (one.min, one.max) for one in found}

    found = ranges()
    assert found["validation.loss.last"] == (0.25, 1.0)
    assert found["training.loss.max"] == (0.5, 2.0)
    assert found["own.rate.last"] == (5.0, 5.0)
    assert found["searcherMetricsVal"] == (0.25, 1.0)
    assert not [name for name in found if "note" in name]
    fresh_master.change("UPDATE experiments SET best_trial_id = NULL, best_metric = NULL")
    assert ranges() == {}


def test_labels_come_by_how_often_they_are_used(session: api.Session) -> None:
    assert bindings.get_GetExperimentLabels(session).labels == ["b", "a"]
    assert bindings.get_GetExperimentLabels(session, projectId=2).labels == []
    assert bindings.put_PutExperimentLabel(session, experimentId=3, label="b c").labels == ["b c"]
    assert bindings.get_GetExperimentLabels(session).labels == ["b", "a", "b c"]
    assert bindings.delete_DeleteExperimentLabel(session, experimentId=1, label="b").labels == ["a"]
    assert bindings.get_GetExperimentLabels(session, projectId=1).labels == ["a", "b"]
