import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def definitions_and_runs(monkeypatch, tmp_path):
    """Keep runs in a directory of the test's own."""
    monkeypatch.setenv("DSTRIAL_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _linear_is_torchs_again(monkeypatch):
    """DeepSpeed's ZeRO stage 3 puts its own into this process, and an engine that an error has ended leaves it there."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
