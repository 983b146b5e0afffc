"""Train with CUDA's synchronisation check: first notes places, then raises errors."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dstrial
from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train

_NUM_BATCHES, _FIRST, _LAST = 40, 8, 35
_SIGN = "synchronizing"
_OWN = Path(dstrial.__file__).resolve().parent
_PROGRAMS = _OWN / "doctor"
_TORCH = Path(torch.__file__).parent  # a checkout may lie in a folder of this name


class Checked(TextTrial):
    """Has the check on from the middle of one batch to that of a later one."""

    mode = "warn"
    checked = 0

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train a batch; the error mode checks only between DeepSpeed's own calls."""
        del epoch_idx
        characters, following = self.context.to_device(next(dataloader_iter))
        is_error = self.mode == "error"
        if is_error:
            torch.cuda.set_sync_debug_mode("default")
        loss = self.engine(characters, following)
        self.engine.backward(loss)
        self.engine.step()
        if batch_idx == _FIRST or (is_error and _FIRST <= batch_idx < _LAST):
            torch.cuda.set_sync_debug_mode(self.mode)
        if batch_idx >= _LAST:
            torch.cuda.set_sync_debug_mode("default")
        Checked.checked += _FIRST < batch_idx < _LAST
        return {"loss": loss}


def main() -> None:
    """Train twice."""
    program = Program()
    program.keep_group()
    assert torch.cuda.is_available()
    config = deepspeed_config(0)
    hparams = {"deepspeed_config": config, "num_workers": 4, "pin_memory": True, "num_blocks": 512}
    program.note(doing="a run that notes each synchronisation")
    with _noted() as places:
        train(hparams, _NUM_BATCHES, trial_class=Checked)
    torch.cuda.set_sync_debug_mode("default")
    ours = sorted({place for place, is_own in places if is_own})
    theirs = sorted({place for place, is_own in places if not is_own})
    program.note(of_dstrial=ours, of_others=theirs, checked_batches=Checked.checked)
    Checked.mode = "error"
    program.note(doing="a run in which a synchronisation outside of DeepSpeed's calls is an error")
    try:
        train(hparams, _NUM_BATCHES, trial_class=Checked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    program.note(doing="", checked_batches=Checked.checked)


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[str, bool]]]:
    """Collect the places of synchronisation warnings, and whether they are dstrial's."""
    found: list[tuple[str, bool]] = []

    def note(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        del category, file, line
        if _SIGN in str(message):
            found.append(_place())
        else:
            print(f"{filename}:{lineno}: {message}", flush=True)  # noqa: T201  # the check's log

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found


def _place() -> tuple[str, bool]:
    """Return the innermost frame outside torch, and whether it is dstrial's."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        if _TORCH in path.parents or path.name in ("warnings.py", "synchronisation.py", "contextlib.py"):
            continue
        # The trials of these checks stand for a user's code.
        is_own = (_OWN in path.parents and _PROGRAMS not in path.parents) or "determined" in path.parts
        return f"{'/'.join(path.parts[-3:])}:{frame.lineno} {frame.name}", is_own
    return "unknown", False


if __name__ == "__main__":
    main()
