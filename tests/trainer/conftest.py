import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def definitions_and_runs(monkeypatch, tmp_path):
    """Use the test's temporary directory for runs and as working directory."""
    monkeypatch.setenv("DSTRIAL_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _linear_is_torchs_again(monkeypatch):
    """Restore ``F.linear``, which ZeRO 3 replaces and does not restore after an error."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
