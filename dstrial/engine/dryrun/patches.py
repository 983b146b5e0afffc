"""What replaces parts of torch and DeepSpeed for an engine alone on fake tensors.

Nothing else of the dry run changes foreign code. Patches are undone when their block ends, and each dry run has a process of
its own (``dstrial.engine.dryrun.process``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dstrial.engine.deepspeed_internals import process
from dstrial.engine.dryrun.tracker import Tracker
from dstrial.engine.dryrun.values import Bypass, Target

DEVICE_NAME = "cpu:0"
"""The device of a dry run with target ``cuda``: for torch it is a CPU's, and yet another than the host's ``cpu``."""

USER_CONSTANT = 1.0
"""What user code reads from a fake tensor, unless it is told another value."""

_UNLIMITED_BYTES = 1 << 50
_TORCH, _DEEPSPEED = (
    str(pathlib.Path(str(module.__file__)).resolve().parent) + os.sep for module in (torch, deepspeed)
)
_TORCH_OPTIMIZERS = _TORCH + "optim" + os.sep
_OWN = str(pathlib.Path(__file__).resolve().parent) + os.sep

_COLLECTIVES = "c10d"
_META = "Meta"


@contextlib.contextmanager
def virtual_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of many: collectives return at once, and fill in nothing."""
    size = str(world_size)
    # Who asks for an address expects one; nothing listens there.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    counts = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": "0", **counts, **address}):
        # A store of this process; torch exports it without saying so.
        store = vars(torch.distributed)["HashStore"]()
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _always(value: Any) -> Callable[..., Any]:
    def answer(*_args: object, **_kwargs: object) -> Any:
        return value

    return answer


@contextlib.contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """Disable DeepSpeed's shared-memory CPU collectives, which wait for absent ranks."""
    module, name = process.SHARED_MEMORY_OP
    # As an attribute of deepspeed.comm, torch is the library.
    with mock.patch.object(importlib.import_module(module), name, _always(None)):
        yield


class _NoKernels:
    """Replaces a compiled extension: every function does nothing and returns 0."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_args, **_kwargs: 0


@contextlib.contextmanager
def without_compiled_ops() -> Iterator[None]:
    """Build DeepSpeed's optimizers without a compiler; their kernels never allocate."""
    with (
        mock.patch.object(process.op_builder(), "load", _always(_NoKernels())),
        mock.patch(".".join(process.FUSED_ADAM_KERNEL), _always(None), create=True),
    ):
        yield


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Make ``torch.compile`` a no-op: a compiled model needs other memory."""

    def leave(model: Any = None, **_kwargs: object) -> Any:
        return model if model is not None else lambda later: later

    with mock.patch.object(torch, "compile", leave), mock.patch.object(nn.Module, "compile", _always(None)):
        yield


@contextlib.contextmanager
def module_conversion() -> Iterator[None]:
    """Let ``nn.Module.to`` and the like convert fake parameters, by new data.

    torch swaps the tensor objects instead, and refuses if anything else refers to them.
    """

    def apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else [self]:
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                with torch.no_grad():
                    parameter.data = fn(parameter.data)
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad.data)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def lists_agree() -> Iterator[None]:
    """Let ZeRO 3's comparison of lists agree; fake tensors have no values to read."""
    compare, take_from_rank_0 = process.LIST_COMPARISONS
    with mock.patch(compare, _always(None)), mock.patch(take_from_rank_0, list):
        yield


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Let distributions (gates of experts have them) take fake tensors."""
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(__debug__)  # torch's default


@contextlib.contextmanager
def data_with_device() -> Iterator[None]:
    """Make ``tensor.data = other`` set a fake tensor's device too, as with real ones."""
    base: Any = torch.Tensor.data

    def assign(self: FakeTensor, value: torch.Tensor) -> None:
        base.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    with mock.patch.object(FakeTensor, "data", property(base.__get__, assign)):
        yield


@contextlib.contextmanager
def device_beside_host(tracker: Tracker, device_bytes: int | None) -> Iterator[None]:
    """Make ``DEVICE_NAME`` DeepSpeed's accelerator, with so many bytes of memory."""
    accelerator = get_accelerator()

    def free(_device_index: int | None = None) -> int:
        return (_UNLIMITED_BYTES if device_bytes is None else device_bytes) - tracker.device_bytes

    def pinned(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        return tensor.clone()

    def placed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Let a maker of fake tensors put them on the asked device, not on ``cpu``."""

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            device = kwargs.get("device")
            is_asked = device is not None and torch.device(device) == torch.device(DEVICE_NAME)
            if not (is_asked and isinstance(tensor, FakeTensor)):
                return tensor
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE_NAME)

        return made

    with (
        mock.patch.object(torch, "tensor", placed(torch.tensor)),
        mock.patch.object(torch, "as_tensor", placed(torch.as_tensor)),
        mock.patch.object(accelerator, "current_device_name", _always(DEVICE_NAME)),
        mock.patch.object(accelerator, "device_name", _always(DEVICE_NAME)),
        mock.patch.object(
            accelerator, "on_accelerator", lambda tensor: tensor.device == torch.device(DEVICE_NAME)
        ),
        mock.patch.object(accelerator, "available_memory", free),
        mock.patch.object(accelerator, "is_fp16_supported", _always(True)),
        mock.patch.object(accelerator, "pin_memory", pinned),
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
    ):
        yield


class ScalarReads:
    """Answers ``.item()`` and the like on fake tensors, which have no values.

    User code gets a declared constant, noted in ``bypasses``. DeepSpeed gets 0: no overflow and a gradient norm of 0, after which
    it takes the step. torch's optimizers get 1, their first step.
    """

    def __init__(self, constant: float = USER_CONSTANT) -> None:
        self.bypasses: dict[str, Bypass] = {}
        self._constant = constant

    def __call__(self, tensor: torch.Tensor) -> float | int | bool | complex:
        file, line = _reader()
        if file.startswith(_TORCH_OPTIMIZERS):
            value = 1.0
        elif file.startswith(_DEEPSPEED):
            value = 0.0
        else:
            value = self._constant
            place = f"{file}:{line}"
            self.bypasses[place] = Bypass(place, value)
        if tensor.dtype is torch.bool:
            return bool(value)
        if tensor.dtype.is_complex:
            return complex(value)
        return value if tensor.dtype.is_floating_point else int(value)


def _reader() -> tuple[str, int]:
    """Return who reads a scalar: the innermost file and line outside torch and us."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_OPTIMIZERS) or not file.startswith((_TORCH, _OWN)):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


@contextlib.contextmanager
def phases(tracker: Tracker) -> Iterator[None]:
    """Report to ``tracker`` when engines begin a phase.

    Forward, backward and the optimizer step last until the next one begins; reducing gradients and gathering parameters are
    reported within them.
    """
    with contextlib.ExitStack() as stack:
        for name, phase in process.ENGINE_PHASES:
            _wrap(stack, DeepSpeedEngine, name, functools.partial(_begin, tracker, phase))
        _wrap(stack, torch.Tensor, "backward", functools.partial(_begin, tracker, "backward"))
        for owner, name, phase in process.nested_phases():
            _wrap(stack, owner, name, functools.partial(tracker.within, phase))
        yield


def _wrap(
    stack: contextlib.ExitStack,
    owner: Any,
    name: str,
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    stack.enter_context(mock.patch.object(owner, name, wrapped))


@contextlib.contextmanager
def _begin(tracker: Tracker, phase: str) -> Iterator[None]:
    tracker.enter_phase(phase)
    yield


@contextlib.contextmanager
def all_of_them(
    tracker: Tracker,
    *,
    world_size: int,
    target: Target,
    is_fake: bool,
    device_bytes: int | None = None,
    rank: int = 0,
) -> Iterator[None]:
    """Put everything in place that a dry run of this kind needs.

    Args:
        tracker: the tracker that will be entered.
        world_size: number of ranks that the engine shall believe in.
        target: ``cpu`` or ``cuda``; see ``DryRunRequest``.
        is_fake: whether tensors will be fake.
        device_bytes: memory of the device on target ``cuda``; None for no limit.
        rank: which of the ranks this one is.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_shared_memory_op())
        stack.enter_context(virtual_world(world_size, rank))
        stack.enter_context(phases(tracker))
        if is_fake:
            stack.enter_context(_meta_collectives())
            stack.enter_context(without_compiled_ops())
            stack.enter_context(without_compiler())
            stack.enter_context(module_conversion())
            stack.enter_context(data_with_device())
            stack.enter_context(unvalidated_distributions())
            stack.enter_context(lists_agree())
            if target == "cuda":
                stack.enter_context(device_beside_host(tracker, device_bytes))
        yield


@contextlib.contextmanager
def _meta_collectives() -> Iterator[None]:
    """Let collectives take fake tensors where torch has no kernels for them.

    Torch 2.6 has none, 2.13 has one for each. Such a kernel returns what it was to fill, as it was, and a finished ``Work``.
    Python cannot make one in torch 2.6: it is the answer of torch's ``fake`` process group, which must be the default one, to a
    collective of nothing.

    Source: torch 2.6 csrc/distributed/c10d/Ops.cpp registers CPU, CUDA and other devices; schemas return what they fill, and
    the work.
    """
    names = [name for name in _collectives() if not _has_kernel(name)]
    if not names:
        yield
        return
    work = _ended_work()
    with torch.library._scoped_library(_COLLECTIVES, "IMPL") as library:
        for name in names:
            library.impl(name, _kernel(work, num_returns=_num_returns(name)), _META)
        yield


def _collectives() -> list[str]:
    prefix = _COLLECTIVES + "::"
    return sorted(
        name.removeprefix(prefix)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix) and "." not in name
    )


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{_COLLECTIVES}::{name}", _META)


def _num_returns(name: str) -> int:
    return len(getattr(getattr(torch.ops, _COLLECTIVES), name).default._schema.returns)


def _ended_work() -> Any:
    group = torch.distributed.group.WORLD
    assert group is not None  # the caller has made it
    barrier = getattr(torch.ops, _COLLECTIVES).barrier
    return barrier(torch.empty(0), group.boxed(), [], -1)


def _kernel(work: Any, *, num_returns: int) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        return (None, work, (args[0], work))[num_returns]

    return kernel
