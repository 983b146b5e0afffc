"""Torch files load only with allowed classes; any other class is refused."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from dstrial.engine.checkpoint_reader.safe_load import (
    bind_checkpoint_engine,
    load,
    load_mapped,
    unlisted_in,
    vouched_for,
)
from dstrial.errors import UntrustedCheckpointError


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class OfUser:
    def __init__(self) -> None:
        self.best = 3.5


def scaler() -> DynamicLossScaler:
    return DynamicLossScaler(2.0**16, 1000, 1, 2, False)


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("is_zip", [True, False])
def test_load_restores_classes_of_deepspeed(tmp_path: Path, mmap: bool, is_zip: bool) -> None:
    if mmap and not is_zip:
        pytest.skip("torch maps no files of its old format")
    value = {
        "scalers": [LossScaler(4.0), scaler()],
        "stage": ZeroStageEnum.gradients,
        "slices": [{"w": fragment_address(numel=3, start=1)}],
        "weights": torch.arange(4.0),
        "bits": torch.ones(2, dtype=torch.bfloat16),
    }
    path = saved(tmp_path / "state.pt", value, _use_new_zipfile_serialization=is_zip)

    loaded = load(path, mmap=mmap)

    assert [type(one) for one in loaded["scalers"]] == [LossScaler, DynamicLossScaler]
    assert vars(loaded["scalers"][1]) == vars(scaler())
    assert loaded["stage"] is ZeroStageEnum.gradients
    assert loaded["slices"] == value["slices"]
    assert torch.equal(loaded["weights"], value["weights"])


def test_load_cannot_change_enum_members(tmp_path: Path) -> None:
    class Changing:
        def __reduce__(self) -> Any:
            return ZeroStageEnum, (2,), {"_value_": 0, "_name_": "changed"}

    path = saved(tmp_path / "state.pt", Changing())

    with pytest.raises(UntrustedCheckpointError):
        load(path)
    assert ZeroStageEnum.gradients.value == 2
    assert ZeroStageEnum.gradients.name == "gradients"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.mkdir, "posix.mkdir"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (__import__, "builtins.__import__"),
        (np.dtype, "numpy.dtype"),
        # The function's module has a listed class; the list names classes, not modules.
        (
            __import__("deepspeed").runtime.fp16.loss_scaler.CreateLossScaler,
            "deepspeed.runtime.fp16.loss_scaler",
        ),
        (torch.load, "torch.serialization.load"),
        (torch.hub.load, "torch.hub.load"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("is_zip", [True, False])
def test_load_refuses_unlisted_function_by_name(
    tmp_path: Path, function: Any, name: str, protocol: int, is_zip: bool
) -> None:
    value = {"x": Calls(function, str(tmp_path / "made"))}
    path = saved(
        tmp_path / "state.pt", value, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip
    )

    with pytest.raises(UntrustedCheckpointError) as caught:
        load(path)

    assert name in str(caught.value)
    assert str(path) in str(caught.value)
    assert "--trust-code" in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_load_mapped_bare_pickle_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(pickle.dumps(Calls(os.mkdir, str(tmp_path / "made"))))

    with pytest.raises(UntrustedCheckpointError, match=r"posix\.mkdir"):
        load_mapped(path, holds="a state")
    assert not (tmp_path / "made").exists()


def test_load_with_trusted_code_restores_user_classes(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", {"best": OfUser(), "array": np.arange(3)})

    with pytest.raises(UntrustedCheckpointError, match=r"OfUser.*numpy|numpy.*OfUser"):
        load(path)
    loaded = load(path, trusts_code=True)

    assert loaded["best"].best == 3.5
    assert type(loaded["array"]) is np.ndarray


def test_only_vouched_engine_loads_unlisted_classes(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", {"best": OfUser()})

    class Engine:
        def __init__(self) -> None:
            self.checkpoint_engine = types.SimpleNamespace()
            self.module = torch.nn.Linear(1, 1)

    vouched, other = Engine(), Engine()
    bind_checkpoint_engine(vouched)
    bind_checkpoint_engine(other)
    with vouched_for([vouched], trusts_code=True):
        assert vouched.checkpoint_engine.load(str(path))["best"].best == 3.5
        with pytest.raises(UntrustedCheckpointError):
            other.checkpoint_engine.load(str(path))
        with pytest.raises(UntrustedCheckpointError):
            load(path)
    with pytest.raises(UntrustedCheckpointError):
        vouched.checkpoint_engine.load(str(path))


def test_torchscript_and_tar_files_are_unlisted(tmp_path: Path) -> None:
    """A library's ``torch.load(weights_only=False)`` would run code of both formats."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "script.pt")
    payload = pickle.dumps(Calls(os.mkdir, str(tmp_path / "made")))
    for name in ("old.pt", "old-state"):
        with tarfile.open(tmp_path / name, "w:") as tar:
            for member in ("storages", "tensors", "pickle"):
                entry = tarfile.TarInfo(member)
                entry.size = len(payload)
                tar.addfile(entry, io.BytesIO(payload))
    with tarfile.open(tmp_path / "vocabulary", "w:") as tar:
        tar.addfile(tarfile.TarInfo("words.txt"))

    names = ["script.pt", "old.pt", "old-state", "vocabulary"]
    assert sorted(unlisted_in(tmp_path, names)) == ["old-state", "old.pt", "script.pt"]
    for name in names[:3]:
        with pytest.raises(UntrustedCheckpointError):
            load(tmp_path / name)
    assert not (tmp_path / "made").exists()


def test_load_keeps_safe_globals_of_others(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", LossScaler(1.0))
    with torch.serialization.safe_globals([LossScaler]):
        load(path)
        assert LossScaler in torch.serialization.get_safe_globals()


def test_threads_load_concurrently(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", {"s": LossScaler(1.0), "t": torch.zeros(100)})
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                load(path)
        except BaseException as error:  # noqa: BLE001  # asserted in the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_unlisted_in_skips_files_never_unpickled(tmp_path: Path) -> None:
    """``training_args.bin`` and files in ``code/`` are never unpickled."""
    payload = Calls(os.mkdir, str(tmp_path / "made"))
    (tmp_path / "code").mkdir()
    names = ["a.pt", "b.bin", "training_args.bin", "code/d.pt"]
    for name in names:
        saved(tmp_path / name, payload)
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "empty").write_text("")

    found = unlisted_in(tmp_path, [*names, "c.json", "empty", "gone"])

    assert found == {"a.pt": ("posix.mkdir",), "b.bin": ("posix.mkdir",)}


def test_pickle_of_unknown_suffix_is_scanned(tmp_path: Path) -> None:
    payload = Calls(os.mkdir, str(tmp_path / "made"))
    saved(tmp_path / "state", payload)
    saved(tmp_path / "old-state", payload, _use_new_zipfile_serialization=False)
    names = ["state", "old-state"]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        names.append(f"protocol{protocol}.state")
        (tmp_path / names[-1]).write_bytes(pickle.dumps(payload, protocol=protocol))
    (tmp_path / "cut.state").write_bytes(pickle.dumps(payload, protocol=0).rstrip(b"."))
    (tmp_path / "notes.txt").write_text("config of the run\nsecond line\nthird line\n")

    found = unlisted_in(tmp_path, [*names, "cut.state", "notes.txt"])

    assert found == dict.fromkeys([*names, "cut.state"], ("posix.mkdir",))


def test_pickle_before_archive_is_scanned(tmp_path: Path) -> None:
    archive = saved(tmp_path / "archive.pt", {"a": 1}).read_bytes()
    path = tmp_path / "both.pt"
    path.write_bytes(pickle.dumps(Calls(os.mkdir, str(tmp_path / "made")), protocol=2) + archive)

    assert unlisted_in(tmp_path, ["both.pt"]) == {"both.pt": ("posix.mkdir",)}
    with pytest.raises(UntrustedCheckpointError, match=r"posix\.mkdir"):
        load(path)


def test_numpy_arrays_allowed_in_library_rng_files_only(tmp_path: Path) -> None:
    state = {"numpy": np.random.get_state(legacy=True), "torch": torch.random.get_rng_state()}
    saved(tmp_path / "rng_state.pth", state)
    saved(tmp_path / "dstrial_rank0.pt", state)

    found = unlisted_in(tmp_path, ["rng_state.pth", "dstrial_rank0.pt"])

    assert list(found) == ["dstrial_rank0.pt"]
