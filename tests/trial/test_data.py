"""``to_device`` and pinned memory of loaders; fake tensors claim to be pinned."""

from __future__ import annotations

import collections
import inspect
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from determined import pytorch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import dstrial
from dstrial.loop.data.records import torch_loader
from dstrial.trial.device_transfer import to_device

CUDA = torch.device("cuda", 0)
Pair = collections.namedtuple("Pair", ["left", "right"])


class Recorder(torch.Tensor):
    """A CPU tensor that records the arguments of ``to`` and returns itself."""

    asked: tuple[torch.device, bool] | None
    pinned: bool

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def to(self, device: torch.device, non_blocking: bool = False) -> Recorder:  # type: ignore[override]
        self.asked = (device, non_blocking)
        return self


def tensor(pinned: bool) -> Recorder:
    made = torch.ones(2).as_subclass(Recorder)
    made.pinned, made.asked = pinned, None
    return made


def test_nested_pinned_tensors_move_non_blocking() -> None:
    pinned, plain = [tensor(True) for _ in range(4)], tensor(False)
    value = {"a": [pinned[0], (pinned[1], plain)], "b": Pair(pinned[2], {"c": pinned[3]})}
    moved = to_device(value, CUDA, set())
    assert [one.asked for one in pinned] == [(CUDA, True)] * 4
    assert plain.asked == (CUDA, False)
    assert isinstance(moved["b"], Pair)
    assert moved["b"].right["c"] is pinned[3]
    assert isinstance(moved["a"][1], tuple)
    assert value["a"][1][1] is plain


def test_cpu_moves_are_blocking() -> None:
    pinned = tensor(True)
    to_device(pinned, torch.device("cpu"), set())
    assert pinned.asked == (torch.device("cpu"), False)


def test_packed_sequences_stay_packed() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 2]))
    moved = to_device({"x": packed}, torch.device("meta"), set())["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"


def test_to_device_otherwise_equals_determined(caplog: pytest.LogCaptureFixture) -> None:
    value = {"a": np.arange(3), "b": [torch.ones(1), "text"], "c": np.array(["x"]), "d": (None, 3, "more")}
    cpu = torch.device("cpu")
    types: tuple[set[type], set[type]] = set(), set()
    ours, theirs = to_device(value, cpu, types[0]), pytorch.to_device(value, cpu, types[1])
    assert str(ours) == str(theirs)
    assert types[0] == types[1]
    assert caplog.text.count("'str' to device") == 2  # one warning by each of the functions


def test_all_tensors_move_to_meta_device() -> None:
    moved = to_device([torch.ones(2), np.ones(3)], torch.device("meta"), set())
    assert [one.device.type for one in moved] == ["meta", "meta"]


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_loader_pins_memory_with_accelerator_by_default(
    has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # otherwise torch queries NVML
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: int(has_accelerator))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    records = list(range(8))
    asked = {None: has_accelerator, True: True, False: False}
    for pins, expected in asked.items():
        assert dstrial.DataLoader(records, batch_size=2, pin_memory=pins).pin_memory is expected
    assert dstrial.DataLoader(records).pin_memory is has_accelerator
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert dstrial.DataLoader(records).pin_memory is False


def test_cpu_loader_emits_no_warning() -> None:
    loader = dstrial.DataLoader(list(range(8)), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = torch_loader(loader, loader.dataset, loader.batch_sampler, 3)
        assert [batch.tolist() for batch in read] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_data_loader_signature_equals_determined() -> None:
    assert issubclass(dstrial.DataLoader, pytorch.DataLoader)
    ours, theirs = (inspect.signature(one).parameters for one in (dstrial.DataLoader, pytorch.DataLoader))
    assert list(ours) == list(theirs)
    defaults = {name: (parameter.kind, parameter.default) for name, parameter in theirs.items()}
    assert {name: (parameter.kind, parameter.default) for name, parameter in ours.items()} == {
        **defaults,
        "pin_memory": (inspect.Parameter.POSITIONAL_OR_KEYWORD, None),
    }
