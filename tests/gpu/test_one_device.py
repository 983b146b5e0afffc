"""On one GPU: synchronisation, resuming, telemetry, sharing of the device, the master."""

import json
import time

import pytest
import torch
import yaml
from deepspeed.accelerator import get_accelerator
from programs import ROOT, environment, launch, needs_cuda, reports, run
from waiting import wait_for

from dstrial.telemetry.instruments import timed_events
from dstrial.telemetry.memory import memory_now
from dstrial.telemetry.phase_timer import PhaseTimer
from dstrial.testing.master import master_for_test

pytestmark = [pytest.mark.gpu, needs_cuda]

# name -> (ZeRO stage, sections of the DeepSpeed config)
CONFIGURATIONS = {
    "fp32 zero 0": (0, {}),
    "bf16 zero 1": (1, {"bf16": {"enabled": True}}),
    "bf16 zero 2": (2, {"bf16": {"enabled": True}}),
    "fp16 zero 2": (2, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    # Last: ZeRO 3 replaces torch.nn.functional.linear permanently.
    "bf16 zero 3": (3, {"bf16": {"enabled": True}}),
}


def test_training_loop_avoids_device_sync_between_reports(tmp_path):
    """40 batches run in CUDA's sync debug mode, without DeepSpeed's forward to step."""
    printed = run("sync_program.py", tmp_path=tmp_path, timeout_s=200)
    assert "40 batches without a synchronisation, 40 copies of pinned records" in printed


def test_resume_on_device_reports_equal_uninterrupted_run(tmp_path):
    printed = run("resume_program.py", repr(CONFIGURATIONS), tmp_path=tmp_path, timeout_s=200)
    assert [f"{name}: resumed reports are equal" in printed for name in CONFIGURATIONS] == [True] * 5, printed


def test_device_events_time_phases_without_sync():
    timer = PhaseTimer(timed_events(get_accelerator()))
    assert timer.clock_name == "device events"
    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer.switch(True)
        for _ in range(8):
            timer.run("forward", timer, lambda: matrix @ matrix)
            timer.stepped(timer)
        early = timer.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    late = timer.take()

    assert early or late
    assert all(0 < found["forward"] < 1 for found in (early, late) if found)


def test_memory_now_reports_allocator_and_process_memory():
    kept = torch.empty(2**20, device="cuda")
    found = memory_now(get_accelerator())

    assert found["device_memory_bytes"] >= kept.nbytes
    assert found["device_reserved_memory_bytes"] >= found["device_peak_memory_bytes"] > 0
    assert found["process_memory_bytes"] > 0


@pytest.mark.parametrize("check", ["contexts", "registrations", "ordering"])
def test_background_save_check_holds_on_device(tmp_path, check):
    assert run("state_copy_program.py", check, tmp_path=tmp_path).endswith("held\n")


@pytest.mark.parametrize("checks", [["0", "1", "2", "3"], ["pipeline"]], ids=["zero", "pipeline"])
def test_two_ranks_share_single_device(tmp_path, checks):
    printed, status = launch(
        "shared_program.py", 2, *checks, tmp_path=tmp_path, DSTRIAL_SHARE_DEVICE="1", CUDA_VISIBLE_DEVICES="0"
    )
    assert status == 0, printed
    assert [f"{check}: " in printed for check in checks] == [True] * len(checks), printed
    assert printed.count("2 ranks of this machine share cuda:0 over gloo") == 1, printed


def test_launch_two_ranks_single_device_rejected_by_default(tmp_path):
    printed, status = launch("shared_program.py", 2, "0", tmp_path=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert status != 0
    assert "--slots is 2; expected at most 1" in printed, printed


def test_killed_rank_releases_device_memory(tmp_path):
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)

        def used_mib():
            return pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20

        before = used_mib()
        printed, status = launch("killed_program.py", 1, tmp_path=tmp_path)
        assert status == 137, (status, printed)
        assert "took 4096 MiB" in printed
        assert "SIGKILL" in printed
        wait_for(lambda: used_mib() <= before + 256, f"more than {before} + 256 MiB are used", deadline_s=30)
    finally:
        pynvml.nvmlShutdown()


@pytest.mark.parametrize(("num_slots", "stage"), [(1, 1), (2, 1)], ids=["one rank", "two that share"])
def test_master_zero1_trial_completes_on_gpu(tmp_path, num_slots, stage):
    definitions = ROOT / "tests" / "programs"
    config = {
        "name": "on a GPU",
        "entrypoint": "python3 -m dstrial.launch --trial small_trials:DataParallelTrial",
        "hyperparameters": {
            "deepspeed_config": {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 1,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": stage},
            }
        },
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": 20},
            "smaller_is_better": True,
        },
        "resources": {"slots_per_trial": num_slots},
        "max_restarts": 0,
        "scheduling_unit": 5,
        "reproducibility": {"experiment_seed": 3},
        "profiling": {"enabled": True},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    env = {
        "DS_ACCELERATOR": "cuda",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONPATH": environment()["PYTHONPATH"],
    }
    if num_slots > 1:
        env["DSTRIAL_SHARE_DEVICE"] = "1"
    with master_for_test(tmp_path, num_slots=num_slots, env=env) as master:
        client = master.client()
        assert {slot["kind"] for slot in master.record.slots} == {"cuda"}, master.record.slots
        created = master.det("experiment", "create", str(path), str(definitions))
        assert created.returncode == 0, created.stdout + created.stderr
        give_up_at_s = time.monotonic() + 150
        while True:
            experiment = client.get("/api/v1/experiments/1")["experiment"]
            state = experiment["state"].removeprefix("STATE_")
            if state in ("COMPLETED", "ERROR", "CANCELED"):
                break
            assert time.monotonic() < give_up_at_s, f"{state}\n{master.det('trial', 'logs', '1').stdout}"
            time.sleep(0.2)
        logs = master.det("trial", "logs", "1").stdout
        assert state == "COMPLETED", logs
        metrics = client.get("/api/v1/trials/1")["trial"]
        assert metrics["totalBatchesProcessed"] == 20, json.dumps(metrics)
        telemetry = reports(client, 1, "telemetry")
        assert {len(one["ranks"]["process_peak_memory_bytes"]) for one in telemetry} == {num_slots}
        for group, name in (("gpu", "gpu_util"), ("gpu", "gpu_free_memory"), ("memory", "memory_free")):
            assert name in json.dumps(reports(client, 1, group)), (group, name)
