"""On a GPU: precisions, operators, faults, saves, memory, forks and searches."""

import importlib.util
import itertools
import json
import math
import re
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import memory_program
import pytest
from programs import environment, facts, finish, launch, needs_cuda, reports

from dstrial.doctor.proof import Target, experiment
from dstrial.dsat.predictor.closed_form import zero_run
from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.engine.dryrun.process import dry_runs
from dstrial.engine.dryrun.values import DryRunRequest
from dstrial.testing.master import master_for_test

pytestmark = [pytest.mark.gpu, needs_cuda]

TARGET = Target("cuda", 1, "fp32")


def nvml_uuids():
    """Return UUIDs: of all devices, and of the first device's first MIG instance."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(idx) for idx in range(pynvml.nvmlDeviceGetCount())]
        try:
            instances = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handles[0], 0)]
        except pynvml.NVMLError:
            instances = []  # raised by devices without MIG
        return [[pynvml.nvmlDeviceGetUUID(one) for one in found] for found in (handles, instances)]
    finally:
        pynvml.nvmlShutdown()


def test_visible_devices_accept_index_and_uuid(tmp_path):
    uuids, instances = nvml_uuids()
    for value in ["0", uuids[0], *instances]:
        variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        printed, status = launch("visible_program.py", 1, tmp_path=tmp_path, **variables)
        assert status == 0, (value, printed)
        assert re.search(r"cuda:0 has \d+ bytes", printed), printed


def test_zero_stages_all_precisions_have_finite_losses(tmp_path):
    printed, status = launch("precision_program.py", 1, tmp_path=tmp_path, timeout_s=240)
    assert status == 0, printed
    rows = facts(printed)["rows"]
    expected = {pair for pair in itertools.product(("fp32", "bf16", "fp16"), range(4)) if pair != ("fp16", 0)}
    assert {(precision, stage) for precision, stage, *_ in rows} == expected
    for precision, stage, losses, scales, num_skipped in rows:
        assert all(map(math.isfinite, losses)), (precision, stage, losses)
        if precision == "fp16":
            assert num_skipped > 0, (stage, scales)
            assert scales[-1] < 2**32, (stage, scales)


def test_torch_compile_keeps_losses(tmp_path):
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if importlib.util.find_spec("triton") is None or not shutil.which("cc") or not headers.exists():
        pytest.skip("Requires: [Triton, a C compiler, Python's headers]")
    printed, status = launch("compiled_program.py", 1, tmp_path=tmp_path, timeout_s=240)
    assert status == 0, printed
    found = facts(printed)
    assert found["num_graphs"] > 0
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)


def test_background_save_is_bitwise_equal_with_short_stall(tmp_path):
    printed, status = launch("save_program.py", 1, "1024", tmp_path=tmp_path, timeout_s=240)
    assert status == 0, printed
    found = facts(printed)
    assert found["num_values"] > 100
    assert found["different"] == []
    assert found["stall_ratio"] < 0.2, found


def test_out_of_memory_reported_and_next_run_trains(tmp_path):
    printed, status = launch("fault_program.py", 1, "memory:0", tmp_path=tmp_path)
    assert status != 0
    assert "out of memory" in printed, printed
    printed, status = launch("fault_program.py", 1, tmp_path=tmp_path)
    assert status == 0, printed
    assert all(map(math.isfinite, facts(printed)["losses"])), printed


def test_killed_rank_on_shared_device_named_within_15s(tmp_path):
    shared = {"DSTRIAL_SHARE_DEVICE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    printed, status = launch("fault_program.py", 2, "kill:1", tmp_path=tmp_path, **shared)
    ended_s = time.time()
    assert status != 0
    assert "rank 1 failed first (killed by SIGKILL" in printed, printed
    found = facts(printed)
    assert found == {"all_reduce": 3.0, "control_channel": ["rank 0", "rank 1"], "device": "cuda:0"}, found
    assert ended_s - float(re.search(r"fails at ([\d.]+)", printed)[1]) < 15


def test_predicted_memory_within_15_percent_of_measured(tmp_path):
    chosen = list(itertools.product(("fp32", "bf16"), (0, 1, 3)))
    requests = [
        DryRunRequest(
            workload="model_workload:ModelWorkload",
            options={
                "model": "memory_program:model",
                "batch": "memory_program:batch",
                "config": memory_program.config(stage, precision),
                "shape": memory_program.SHAPE,
            },
            world_size=1,
            module_paths=(str(Path(__file__).parent), str(Path(__file__).parents[1] / "programs")),
        )
        for precision, stage in chosen
    ]
    predicted = []
    for (precision, stage), trace in zip(chosen, dry_runs(requests, num_parallel=4), strict=True):
        config, width = memory_program.config(stage, precision), 4 if precision == "fp32" else 2
        zero = ZeroFeatures.from_config(config, replicas=1, bytes_per_value=width)
        run = zero_run(trace, zero, is_accumulating=False)
        predicted.append(run.device.peak(memory_program.RECORDS))
    printed, status = launch("memory_program.py", 1, json.dumps(chosen), tmp_path=tmp_path)
    assert status == 0, printed
    measured = facts(printed)["peaks"]
    ratios = [said / found for said, found in zip(predicted, measured, strict=True)]
    assert all(abs(ratio - 1) <= 0.15 for ratio in ratios), dict(zip(chosen, ratios, strict=True))


LIMITED_TRIAL = """
import torch

from dstrial.doctor.proof_trial import TextTrial


class LimitedTrial(TextTrial):
    def __init__(self, context):
        if context.device.type == "cuda":  # false in a dry run
            share = 4 * 2**30 / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(share)
        super().__init__(context)
"""


def test_search_at_memory_limit_predicts_time_and_memory(tmp_path):
    """The user's own config, micro batch 256, is too large for 4 GiB; the search goes on."""
    (tmp_path / "definition").mkdir()
    (tmp_path / "definition" / "limited.py").write_text(LIMITED_TRIAL)
    config = experiment("search", TARGET, 1)
    config["entrypoint"] = "python3 -m dstrial.launch --trial limited:LimitedTrial"
    config["hyperparameters"] |= {"shape": memory_program.SHAPE, "num_blocks": 1024}
    config["hyperparameters"]["deepspeed_config"]["train_micro_batch_size_per_gpu"] = 256
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(config))
    output = tmp_path / "search"
    command = [sys.executable, "-m", "dstrial.dsat", "predict", str(path), str(path.parent / "definition")]
    command += ["--local", "--max-trials", "8", "--fresh", "--zero-stages", "0", "1", "2", "3"]
    command += ["--measure-seconds", "3", "--output", str(output)]
    done = finish(command, tmp_path, 480)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((output / "report.json").read_text())["trials"]
    assert [row["state"] for row in rows if row["is_own"]] == ["DEVICE_OOM"], done.stdout
    measured = [row for row in rows if row["state"] == "measured"]
    assert len(measured) >= 4, done.stdout
    table = [
        [row["description"], *(row["predicted"][name] / row[name] for name in ("step_s", "memory_bytes"))]
        for row in measured
        if row["predicted"] and row["predicted"]["step_s"] and row["predicted"]["memory_bytes"]
    ]
    print(*table, sep="\n")  # predicted / measured
    assert len(table) >= 3, rows
    # The predictor has learned the machine's speed by its last trial; memory is known from the dry run.
    assert 0.5 < table[-1][1] < 2, table
    assert all(0.75 < memory < 1.25 for _, _, memory in table), table


def test_forked_trial_losses_match_new_process(tmp_path):
    """Trial 1 is a new process (``warm: false``); two of the next four must be forks."""
    says_how = (
        "import pathlib\n"
        "is_new = any(one.startswith(b'RANK=') for one in pathlib.Path('/proc/self/environ').read_bytes().split(b'\\0'))\n"
        "print('started as a new process' if is_new else 'started as a fork', flush=True)\n"
        "from dstrial.doctor.proof_trial import TextTrial\n"
    )
    (tmp_path / "definition").mkdir()
    (tmp_path / "definition" / "model_def.py").write_text(says_how)
    losses, logs = [], []
    env = {
        "DS_ACCELERATOR": "cuda",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONPATH": environment()["PYTHONPATH"],
    }
    with master_for_test(tmp_path, num_slots=1, env=env) as master:
        for number in range(1, 6):
            config = experiment("warm", TARGET, 1)
            config["entrypoint"] = "python3 -m dstrial.launch --trial model_def:TextTrial"
            config["data"] = {"dstrial": {"warm": number > 1}}
            config["hyperparameters"]["is_deterministic"] = False
            path = tmp_path / "experiment.yaml"
            path.write_text(json.dumps(config))
            created = master.det(
                "experiment", "create", str(path), str(tmp_path / "definition"), "--follow-first-trial"
            )
            assert created.returncode == 0, created.stdout + created.stderr
            logs.append(master.det("trial", "logs", str(number)).stdout)
            state = master.client().get(f"/api/v1/experiments/{number}")["experiment"]["state"]
            assert state.endswith("COMPLETED"), logs[-1]
            losses.append([one["loss"] for one in reports(master.client(), number, "training")])
            if sum("started as a fork" in log for log in logs) == 2:
                break
    assert "started as a fork" not in logs[0]
    assert sum("started as a fork" in log for log in logs) == 2, logs
    assert losses[0]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-4)
