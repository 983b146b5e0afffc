"""Read runs from the files of W&B and MLflow.

A child process reads W&B and MLflow: python stores.py wandb DIRECTORY | python stores.py mlflow URI
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Rows = list[tuple[int, dict[str, float]]]
"""(batches trained, metric name -> value) in stored order."""


def read(kind: str, where: object) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, kind, str(where)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _wandb(directory: str) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted(Path(directory).glob("*run-*/*.wandb"), key=lambda path: path.parent.name):
        store = DataStore()
        store.open_for_scan(str(path))
        one: dict[str, Any] = {"rows": [], "config": {}, "summary": {}, "exit": None, "text": "", "axes": {}}
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            one["text"] += str(record)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                one["rows"].append((record.history.step.num, row))
            elif kind == "run":
                run = record.run
                one.update(id=run.run_id, project=run.project, group=run.run_group, name=run.display_name)
                one["config"] = {item.key: json.loads(item.value_json) for item in run.config.update}
            elif kind == "summary":
                for item in record.summary.update:
                    one["summary"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            elif kind == "metric" and record.metric.glob_name:
                one["axes"][record.metric.glob_name] = record.metric.step_metric
            elif kind == "exit":
                one["exit"] = record.exit.exit_code
        found.append(one)
    return found


def _mlflow(uri: str) -> list[dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            rows = [
                (metric.step, {name: metric.value})
                for name in run.data.metrics
                for metric in sorted(
                    client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.timestamp
                )
            ]
            found.append(
                {
                    "id": run.info.run_id,
                    "experiment": experiment.name,
                    "name": run.info.run_name,
                    "status": run.info.status,
                    "tags": run.data.tags,
                    "params": run.data.params,
                    "rows": rows,
                }
            )
    return found


if __name__ == "__main__":
    kind, where = sys.argv[1:]
    print(json.dumps(_wandb(where) if kind == "wandb" else _mlflow(where)))
