"""Real loggers with failing servers, a full disk or unsupported metrics."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stores
from namespaces import unshare

PROGRAM = Path(__file__).with_name("troubled.py")

pytestmark = [pytest.mark.loggers, pytest.mark.process, pytest.mark.timeout(600)]


def run(
    work: Path, what: str, seconds: float, loggers: dict[str, Any], words: list[str] | None = None, **env: str
) -> str:
    given = [f"{name}={json.dumps(options)}" for name, options in loggers.items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW"))}
    done = subprocess.run(
        [*(words or []), sys.executable, str(PROGRAM), str(work), what, str(seconds), *given],
        env={**kept, "NETRC": str(work / "netrc"), "DS_ACCELERATOR": "cpu", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
        cwd=work,
    )
    assert done.returncode == 0, done.stdout
    assert "training went on" in done.stdout
    return done.stdout


def warnings(output: str, name: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"WARNING: logger {name}")]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_unreachable_server_warns_and_training_continues(tmp_path: Path, closed_port: int) -> None:
    address = f"http://127.0.0.1:{closed_port}"
    output = run(
        tmp_path,
        "plain",
        300,
        {"wandb": {}, "mlflow": {"tracking_uri": address}},
        WANDB_BASE_URL=address,
        WANDB_API_KEY="a" * 40,
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    (offline,) = warnings(output, "wandb")
    assert "logger wandb: the server cannot be used (" in offline
    assert (
        "so the run is stored on disk and not shown online; training continues. Upload it later: wandb"
        in offline
    )
    kept = [one for one in stores.read("wandb", tmp_path / "disk" / "run" / "wandb") if one["rows"]]
    assert [[(step, row["training/loss"]) for step, row in one["rows"]] for one in kept] == [
        [(1, 0.5), (3000, 0.25)]
    ]
    begin, lost = warnings(output, "mlflow")
    assert "logger mlflow: it cannot start: MlflowException" in begin
    assert "No report of this run is stored there; training continues." in begin
    assert lost == "WARNING: logger mlflow: 2 of 2 reports are lost"


def test_hanging_server_is_abandoned_and_losses_counted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        output = run(
            tmp_path, "plain", 2, {"mlflow": {"tracking_uri": f"http://127.0.0.1:{server.getsockname()[1]}"}}
        )
    late, left, lost = warnings(output, "mlflow")
    assert "logger mlflow: it has not started yet; training continues, and reports are queued" in late
    assert "it has not ended and is left behind" in left
    assert "2 of 2 reports are lost" in lost


def test_full_disk_is_reported_with_losses(tmp_path: Path) -> None:
    words = unshare("--mount", probe=f"mount -t tmpfs small {tmp_path}")
    output = run(tmp_path, "full", 300, {"mlflow": {}}, words)
    told = warnings(output, "mlflow")
    assert any("on are lost: " in line and "full" in line for line in told), output
    assert len(told) <= 3, told
    assert "of 3000 reports are lost" in output
    assert "Traceback" not in output


def test_concurrent_processes_share_new_mlflow_database(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda _: run(tmp_path, "plain", 300, {"mlflow": {}}), range(3)))
    assert [warnings(output, "mlflow") for output in outputs] == [[], [], []]
    (found,) = stores.read("mlflow", f"sqlite:///{tmp_path / 'disk' / 'mlflow.db'}")
    assert {(step, metrics["training/loss"]) for step, metrics in found["rows"]} == {(1, 0.5), (3000, 0.25)}


def test_odd_names_and_numbers_are_stored(tmp_path: Path) -> None:
    """W&B stores them unchanged; MLflow replaces what its names and SQL do not accept."""
    output = run(tmp_path, "odd", 300, {"wandb": {"mode": "offline"}, "mlflow": {}})
    assert output.count("metrics that are not numbers are not logged: text") == 1
    assert "are lost" not in output

    (kept,) = stores.read("wandb", tmp_path / "disk" / "run" / "wandb")
    (row,) = (row for step, row in kept["rows"] if step == 2)
    values = {name: float(value) for name, value in row.items() if name.startswith("validation/")}
    assert repr(values["validation/loss"]) == "nan"
    assert (values["validation/up"], values["validation/down"]) == (float("inf"), float("-inf"))
    odd = [values[f"validation/{name}"] for name in ("a☃[0]", "../up", "", "long" * 100, "x.y")]
    assert odd == [1.0, 3.0, 4.0, 5.0, 6.0]

    (of_mlflow,) = stores.read("mlflow", f"sqlite:///{tmp_path / 'disk' / 'mlflow.db'}")
    values = {
        name: value for step, metrics in of_mlflow["rows"] for name, value in metrics.items() if step == 2
    }
    assert repr(values.pop("validation/loss")) == "nan"
    assert values.pop("validation/up") == -values.pop("validation/down") > 1e308
    assert values.pop("validation/a__0_") == 1.0
    assert sorted(values.values()) == [3.0, 4.0, 5.0, 6.0]
