"""Keep torch's compiler out of a process until somebody compiles.

Loading ``torch._dynamo`` and ``torch._inductor`` takes longer than loading the rest of torch. A training process that compiles
nothing loads both all the same (torch 2.13, DeepSpeed 0.19.8):

- ``Optimizer.add_param_group`` and its like, and parts of ZeRO 3, are wrapped to switch the compiler off, and load it to do so
  (``torch/_compile.py:41``).
- ``step`` of torch's optimizers breaks the compiler's graph (``torch/optim/optimizer.py:61``).
- ZeRO 3 decorates its hooks by ``torch.compiler.disable`` (``runtime/zero/parameter_offload.py:358``).
- Muon's functions are decorated by ``torch.compile`` when they are imported (``runtime/zero/muon/original_muon.py:50``), and
  ZeRO imports them for every optimizer (``runtime/zero/utils.py:72``).

None of it does anything where nothing is compiled. ``torch.compile`` and ``torch.compiler`` stay as they are while code of a
user runs, and the first import of ``torch._dynamo``, by whomever, puts everything back before it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._compile import _disable_dynamo

COMPILER = "torch._dynamo"
"""The module of torch that is kept out, with all that it imports."""

SWITCHED_OFF = (
    ("torch.optim.optimizer", "Optimizer"),
    ("torch.utils.checkpoint", None),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", None),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", None),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"),
)
"""Modules, and classes in them, with functions that ``torch._disable_dynamo`` has wrapped."""

MUON = "deepspeed.runtime.zero.muon.original_muon"
"""The module whose import compiles, by ``compile`` of ``MUON_DECORATOR``."""
MUON_DECORATOR = ("deepspeed.runtime.compiler", "compile")

ZERO_3_HOOKS = ("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload", "setup_zero_stage3_hooks")
"""Module, class and method that decorate ZeRO 3's hooks."""

# By torch._disable_dynamo, which remembers under this name, on the function that it wraps, what to call in its stead.
_REMEMBERED = "__dynamo_disable"

_EMPTY = CellType()
_functions: weakref.WeakSet[FunctionType] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[FunctionType, CodeType] = weakref.WeakKeyDictionary()


def keep_compiler_out() -> None:
    """Let this process train without loading torch's compiler.

    Does nothing where it is loaded already. What DeepSpeed compiles is compiled at its first call.

    Ranks: each its own; no communication.
    """
    if any(isinstance(finder, _Restorer) for finder in sys.meta_path):
        return
    if COMPILER not in sys.modules:
        sys.meta_path.insert(0, _Restorer())
        for module_name, owner in SWITCHED_OFF:
            module = importlib.import_module(module_name)
            keep_compiler_out_of(module if owner is None else getattr(module, owner))
        for step in optimizer_steps():
            _steps[step] = step.__code__
            step.__code__ = _STEP_CODE
        _defer_hooks_of_zero_3()
    if MUON not in sys.modules:
        decorators = importlib.import_module(MUON_DECORATOR[0])
        with (
            contextlib.suppress(ImportError),
            _replaced(decorators, MUON_DECORATOR[1], lambda: compiled_when_called),
        ):
            importlib.import_module(MUON)


def keep_compiler_out_of(owner: type | ModuleType) -> None:
    """Let a class or module run without the compiler that it switches off.

    Does nothing where it is loaded already, or has not been kept out of the process.

    Args:
        owner: whose functions ``torch._disable_dynamo`` has wrapped, as it does those of a ``TorchDispatchMode``.

    Ranks: each its own; no communication.
    """
    if any(isinstance(finder, _Restorer) for finder in sys.meta_path):
        for function in switched_off(owner):
            _pass_by(function)


def switched_off(owner: type | ModuleType) -> Iterator[FunctionType]:
    """Yield what ``torch._disable_dynamo`` has wrapped, also below other decorators."""
    for value in list(vars(owner).values()):
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        for inner in _decorated(function):
            if inner.__code__ is _WRAPPER_CODE:
                yield inner.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it


def optimizer_steps() -> Iterator[FunctionType]:
    """Yield ``step`` of torch's optimizers, also below the hooks of the profiler."""
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        for inner in _decorated(step):
            code = inner.__code__
            if code.co_name == _STEP_CODE.co_name and code.co_freevars == _STEP_CODE.co_freevars:
                yield inner


def _decorated(function: object) -> Iterator[FunctionType]:
    """Yield a function and those that it decorates.

    Not all decorators set ``__wrapped__``.
    """
    waiting, seen = [function], set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function
            waiting += [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]


def compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``torch.compile(function)`` does, which is asked at the first call."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


class _Restorer(importlib.abc.MetaPathFinder):
    """Finds nothing; puts torch's functions back when its compiler is looked for."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name != COMPILER:
            return
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        for function in list(_functions):
            with contextlib.suppress(AttributeError):
                delattr(function, _REMEMBERED)
        for step, code in list(_steps.items()):
            step.__code__ = code
        _functions.clear()
        _steps.clear()


def _pass_by(function: FunctionType) -> None:
    """Have the wrapper of a function call the function itself."""
    setattr(function, _REMEMBERED, function)
    _functions.add(function)


def _use_grad_for_differentiable(func: Callable[..., Any]) -> FunctionType:
    """Do as torch's decorator of ``step`` does, with no graph to break.

    Source: ``torch/optim/optimizer.py:59``, whose code is replaced by that of the inner function; it runs among that
    module's names.
    """

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        prev_grad = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(prev_grad)

    assert isinstance(_use_grad, FunctionType)
    return _use_grad


def _defer_hooks_of_zero_3() -> None:
    """Have ZeRO 3's hooks wrapped as DeepSpeed wraps its other functions: lazily."""
    module_name, owner, name = ZERO_3_HOOKS
    offload = getattr(importlib.import_module(module_name), owner)
    set_up = getattr(offload, name)

    @functools.wraps(set_up)
    def set_up_lazily(self: Any) -> Any:
        if COMPILER in sys.modules:
            return set_up(self)
        with _replaced(torch.compiler, "disable", _disabled_when_compiled):
            return set_up(self)

    setattr(offload, name, set_up_lazily)


@contextlib.contextmanager
def _replaced(owner: ModuleType, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _disabled_when_compiled(function: FunctionType) -> Callable[..., Any]:
    wrapper: Callable[..., Any] = _disable_dynamo(function)
    _pass_by(function)
    return wrapper


_WRAPPER_CODE: CodeType = _disable_dynamo(lambda: None).__code__
_STEP_CODE = _use_grad_for_differentiable(lambda: None).__code__
