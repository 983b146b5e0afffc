"""Whose a synchronisation is that CUDA's check tells of: by the innermost line outside of torch."""

from __future__ import annotations

import warnings

import determined.pytorch
import pytest
import torch

import dstrial.loop.loop
from dstrial.doctor.training.programs import synchronisation

WARNING = "warnings.warn('called a synchronizing CUDA operation')"


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        (dstrial.loop.loop.__file__, True),
        (determined.pytorch.__file__, True),
        ("/home/user/model_def.py", False),
        ("/lib/site-packages/deepspeed/runtime/engine.py", False),
        (synchronisation.__file__.replace("synchronisation", "trial"), False),
    ],
)
def test_a_synchronisation_is_that_of_the_file_that_asks_for_it(file: str, is_own: bool) -> None:
    with synchronisation._noted() as places:
        exec(compile(WARNING, file, "exec"), {"warnings": warnings})
    ((place, found),) = places
    assert found is is_own, place
    assert file.rpartition("/")[2] in place


def test_torchs_own_frames_are_looked_through() -> None:
    inner = compile(WARNING, torch.nn.functional.__file__, "exec")
    outer = compile("exec(inner)", dstrial.loop.loop.__file__, "exec")
    with synchronisation._noted() as places:
        exec(outer, {"inner": inner, "warnings": warnings})
    ((place, found),) = places
    assert found, place


def test_other_warnings_are_no_synchronisations() -> None:
    with synchronisation._noted() as places:
        warnings.warn("something else", stacklevel=1)
    assert places == []
