"""Tests of what the loop does with a user's callbacks."""

from __future__ import annotations

import warnings
from pathlib import Path

from determined import pytorch

from dstrial.loop.callbacks import Callbacks


class OldCallback(pytorch.PyTorchCallback):
    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        del checkpoint_dir


def test_the_warning_of_an_old_callback_names_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Callbacks({"new": pytorch.PyTorchCallback(), "old": OldCallback(), "older": OldCallback()})

    (warning,) = caught
    assert warning.category is FutureWarning
    assert str(warning.message) == "the on_checkpoint_end callback is deprecated; use on_checkpoint_write_end"
    line = Path(warning.filename).read_text(encoding="utf-8").splitlines()[warning.lineno - 1]
    assert (Path(warning.filename), line.strip()) == (
        Path(__file__),
        "def on_checkpoint_end(self, checkpoint_dir: str) -> None:",
    )


def test_new_callbacks_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Callbacks({"new": pytorch.PyTorchCallback()})
