"""On a GPU: no device synchronisation between reports, and resuming."""

import pytest
from programs import needs_cuda, run

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
