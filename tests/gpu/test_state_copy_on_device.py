"""Background saves of GPU tensors write the same bytes as ``torch.save``."""

import pathlib

import pytest
import torch

from dstrial.engine.snapshot import HostBuffers, StateCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="Requires: [CUDA device]"),
]


@pytest.mark.parametrize("pins", [False, True])
def test_state_copy_writes_snapshot_of_device_state(tmp_path: pathlib.Path, pins: bool) -> None:
    for name in ("at once", "later"):
        (tmp_path / name).mkdir()
    buffers = HostBuffers(device=torch.device("cuda", 0) if pins else None)
    flat = torch.randn(3_000_000, device="cuda")
    for _ in range(2):
        value = {"views": [flat[:10], flat[10:]], "step": torch.tensor(3.0), "half": flat[:7].bfloat16()}
        torch.save(value, tmp_path / "at once" / "state.pt")
        copies = StateCopies(buffers)
        copies.add(value, str(tmp_path / "later" / "state.pt"))
        flat.add_(1.0)
        copies.write()
        assert (tmp_path / "later" / "state.pt").read_bytes() == (
            tmp_path / "at once" / "state.pt"
        ).read_bytes()
    buffers.clear()
    assert buffers.num_bytes == 0
