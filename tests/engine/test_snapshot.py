"""Deferred checkpoint files, written from host copies of the state."""

import collections
import pathlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

from dstrial.engine.snapshot import HostBuffers, StateCopies


class Scaler:
    def __init__(self) -> None:
        self.scale = 4.0
        self.shared = [1, 2]
        self.again = self.shared


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    flat = torch.randn(1000)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    tied = torch.arange(6, dtype=torch.int64)
    parameter = nn.Parameter(torch.randn(3, 4).t())
    parameter.note = "mine"  # type: ignore[attr-defined]  # DeepSpeed sets attributes on parameters
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [flat[:10], flat[10:30].view(4, 5), flat],
        "tied": (tied, tied),
        "parameter": parameter,
        "half": torch.randn(9).to(torch.bfloat16),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3.0),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.ones(4).untyped_storage(),
        "scaler": Scaler(),
        "shapes": collections.OrderedDict(a=torch.Size([3, 4])),
        "none": None,
    }


def spoil(value: dict[str, Any]) -> None:
    for tensor in value["module"].values():
        tensor.zero_()
    value["views"][2].zero_()
    value["tied"][0].zero_()
    value["parameter"].data.zero_()
    value["scaler"].shared.append(3)
    value["shapes"]["b"] = torch.Size([1])
    value["optimizer"]["param_groups"][0]["lr"] = 99.0
    value["storage"].fill_(0)


def test_deferred_file_is_bitwise_equal_to_immediate(tmp_path: pathlib.Path) -> None:
    (tmp_path / "at once").mkdir()
    (tmp_path / "later").mkdir()
    value = state()
    torch.save(value, tmp_path / "at once" / "state.pt")
    buffers = HostBuffers()
    for _ in range(2):
        value = state()
        copies = StateCopies(buffers)
        copies.add(value, str(tmp_path / "later" / "state.pt"))
        spoil(value)
        thread = threading.Thread(target=copies.write)
        thread.start()
        thread.join()
        assert (tmp_path / "later" / "state.pt").read_bytes() == (
            tmp_path / "at once" / "state.pt"
        ).read_bytes()
        (tmp_path / "later" / "state.pt").unlink()


def test_host_buffers_hold_one_copy_and_are_reused(tmp_path: pathlib.Path) -> None:
    buffers = HostBuffers()
    flat = torch.zeros(10_000)
    value = {"views": [flat[:10], flat[10:]], "other": torch.zeros(500, dtype=torch.int8)}
    seen = set()
    for _ in range(3):
        copies = StateCopies(buffers)
        copies.add(value, str(tmp_path / "state.pt"))
        assert buffers.num_bytes == 40_000 + 512, "whole cache lines"
        copies.write()
        assert buffers.num_bytes == 40_000 + 512
        taken = buffers.take([40_000])
        assert taken is not None
        seen.add(taken[0].data_ptr())
        buffers.release()
    assert len(seen) == 1
    copies = StateCopies(buffers)
    copies.add({"smaller": torch.zeros(3)}, str(tmp_path / "state.pt"))
    copies.write()
    assert buffers.num_bytes == 64


def test_growing_small_file_keeps_large_buffer(tmp_path: pathlib.Path) -> None:
    buffers = HostBuffers()
    for small in (16, 17):
        copies = StateCopies(buffers)
        copies.add({"weight": torch.zeros(small)}, str(tmp_path / "rank.pt"))
        copies.add({"weight": torch.zeros(10_000)}, str(tmp_path / "engine.pt"))
        copies.write()
    assert buffers.num_bytes == 128 + 40_000


@pytest.mark.parametrize(("left", "is_at_once"), [(9_000, False), (8_000, True), (None, False)])
def test_copy_without_memory_writes_immediately_and_warns(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, left: int | None, is_at_once: bool
) -> None:
    copies = StateCopies(HostBuffers(2, lambda: left))
    for name in ("a.pt", "b.pt"):
        copies.add({"weight": torch.zeros(1000)}, str(tmp_path / name))
    assert (tmp_path / "a.pt").exists() == is_at_once
    assert caplog.text.count("does not fit into memory") == int(is_at_once)
    copies.write()
    assert torch.load(tmp_path / "b.pt")["weight"].shape == (1000,)


def test_copy_failure_is_raised_by_write(tmp_path: pathlib.Path) -> None:
    copies = StateCopies(None)
    copies.add({}, str(tmp_path / "missing" / "state.pt"))
    copies.add({}, str(tmp_path / "second.pt"))
    with pytest.raises(RuntimeError, match="missing"):
        copies.write()
    copies = StateCopies(HostBuffers())
    copies.add(lambda: None, str(tmp_path / "state.pt"))
    with pytest.raises(Exception, match=r"pickle|lambda"):
        copies.write()
