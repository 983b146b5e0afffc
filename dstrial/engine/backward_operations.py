"""What asks for an operation while a backward pass runs.

It is told by the functions that are being called, as gradients may be recorded in a backward pass too
(``create_graph=True``), which is what forward operations look like. Nothing is replaced or hooked.
"""

from __future__ import annotations

import enum
import sys
from types import CodeType, FrameType

import torch
from torch.autograd.graph import _engine_run_backward

from dstrial.engine.deepspeed_internals.engines import CHECKPOINT_MODULE, GRADIENT_MODULES


class Origin(enum.Enum):
    """What asks for an operation of a backward pass."""

    GRADIENT = "torch's own formula of a gradient"
    CHECKPOINT = "a checkpointed function that is computed again"
    CODE = "a function of somebody else's, a gradient or recomputation"


_CHECKPOINTS = frozenset(
    {
        ("torch.utils.checkpoint", "unpack_hook"),
        ("torch.utils.checkpoint", "backward"),
        (CHECKPOINT_MODULE, "checkpoint_unpack"),
        (CHECKPOINT_MODULE, "backward"),
    }
)
"""Modules, and functions of theirs, that compute again what was checkpointed.

``backward`` of the reentrant kind goes on to the gradients of it (``torch/utils/checkpoint.py:278``), which are not of these.
"""

_TRANSPARENT = ("torch.", *GRADIENT_MODULES, __name__, "dstrial.engine.model_flops")
"""Beginnings of modules that ask for nothing themselves, or for gradients."""

_DISPATCHERS = ("__torch_dispatch__", "__torch_function__")
"""Methods of anybody's modes and tensors, which pass on what others ask for."""

_NEW_PASS: CodeType = _engine_run_backward.__code__


def origin() -> tuple[Origin, str]:
    """Return what asks for the operation that is dispatched in backward.

    Returns:
        What, and the function's module and name where it is ``CODE``.

    Ranks: any. Some microseconds: it looks at all functions that are being called in this thread, as what is differentiated
    may be part of what is computed again.
    """
    frame: FrameType | None = sys._getframe(1)
    called = ""  # the module whose function this frame has called
    code: str | None = None
    is_in_pass = True
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if (module, name) in _CHECKPOINTS and not (name == "backward" and called == torch.autograd.__name__):
            return Origin.CHECKPOINT, ""
        if frame.f_code is _NEW_PASS:
            is_in_pass = False
        elif is_in_pass and code is None and not (module.startswith(_TRANSPARENT) or name in _DISPATCHERS):
            code = f"{module}.{name}"
        called, frame = module, frame.f_back
    return (Origin.GRADIENT, "") if code is None else (Origin.CODE, code)
