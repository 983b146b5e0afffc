"""Restoring torch's process-wide settings after a trial in a persistent rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dstrial.dsat.rank.cleanup import Settings, _read


def _set(path: str, value: Any) -> None:
    *owners, attribute = path.split(".")
    owner: Any = torch.backends
    for name in owners:
        owner = getattr(owner, name)
    setattr(owner, attribute, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cuda.matmul.fp32_precision", "tf32"),
        ("fp32_precision", "tf32"),
        ("cudnn.conv.fp32_precision", "ieee"),
        ("cuda.matmul.allow_tf32", True),
        ("cudnn.allow_tf32", False),
        ("cudnn.benchmark", True),
        ("cudnn.deterministic", True),
        ("cudnn.enabled", False),
        ("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_settings_restore_backend_settings(path: str, value: Any) -> None:
    """torch 2.13 refuses to read the old TF32 names while a new name is set."""
    if "fp32_precision" in path and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("Requires: [torch 2.9]")
    before = Settings()
    try:
        _set(path, value)
        assert _changed(before)
    finally:
        before.restore()
    assert not _changed(before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_settings_restore_kernels_determinism_and_environment() -> None:
    before = Settings()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.bfloat16)
        os.environ["SET_BY_A_TRIAL"] = "1"
        os.chdir("/")
    finally:
        before.restore()
    assert not _changed(before)
    assert not torch.are_deterministic_algorithms_enabled()


def _changed(settings: Settings) -> bool:
    return any(_read(read) != value for read, _, value in settings._values)
