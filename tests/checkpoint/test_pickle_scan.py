"""``read_pickle`` finds the names in a pickle without importing or calling them."""

from __future__ import annotations

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dstrial.checkpoint.pickle_scan import read_pickle


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def contents(value: Any, protocol: int = 2) -> Any:
    return read_pickle(io.BytesIO(pickle.dumps(value, protocol=protocol)))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_read_pickle_finds_names_without_calling_them(protocol: int, tmp_path: Path) -> None:
    value = {
        "a": [1, 2.5, None],
        "b": (collections.OrderedDict(x=1), Calls(os.mkdir, str(tmp_path / "made"))),
    }

    found = contents(value, protocol)

    assert set(found.names) >= {"collections.OrderedDict", "posix.mkdir"}
    assert not (tmp_path / "made").exists()


def test_pickle_of_plain_values_has_no_names() -> None:
    assert contents({"a": [1, 2.5, "x", None, True, (3,)], 4: {"b": b""}}, protocol=4).names == ()


def test_read_pickle_imports_no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    assert read_pickle(io.BytesIO(b"cnever_imported\nThing\n(tR.")).names == ("never_imported.Thing",)


def test_names_before_pickle_damage_are_reported() -> None:
    whole = pickle.dumps([Calls(os.mkdir, "x"), list(range(1000))], protocol=2)

    assert read_pickle(io.BytesIO(whole[:60])).names == ("posix.mkdir",)
    assert read_pickle(io.BytesIO(b"no pickle at all")).names == ()
    # An extension code stands for an object of this process; the pickle does not contain its name.
    assert read_pickle(io.BytesIO(b"\x80\x02\x82\x05.")).names == ("copyreg extension 5",)


def test_numeric_numpy_dtypes_are_not_odd() -> None:
    arrays = [np.zeros(3, dtype=kind) for kind in ("u4", "i8", ">f4", "f2", "c16", "b1", "u1")]

    found = contents([*arrays, np.random.get_state(legacy=True), np.float64(1.5)])

    assert "numpy.dtype" in found.names
    assert not found.has_odd_dtype


def test_build_opcode_on_class_is_reported() -> None:
    """The BUILD opcode on a class would change the class for the whole process."""
    setting = b"\x80\x02ctorch\nTensor\nN}X\x08\x00\x00\x00backwardK\x01s\x86b."

    assert read_pickle(io.BytesIO(setting)).names == ("a new state of torch.Tensor", "torch.Tensor")


ODD = [
    (("O8", False, True), None),
    # The flags deny that elements are objects: an array of this dtype would read bytes as pointers and crash.
    (("O8", False, True), (3, "|", None, None, None, -1, -1, 0)),
    (("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
    (("u4", False, True), (3, "<", None, None, None, -1, -1, 63)),
    (("u4", False, True), (3, "<", None, None, None, 1 << 40, -1, 0)),
]


@pytest.mark.parametrize(("args", "state"), ODD)
def test_non_numeric_numpy_dtype_is_odd(args: tuple[Any, ...], state: Any) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (np.dtype, args) if state is None else (np.dtype, args, state)

    assert contents(Odd()).has_odd_dtype
