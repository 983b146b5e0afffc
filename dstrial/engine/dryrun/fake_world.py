"""Simulate ranks, compiled kernels and tensor values for a dry run.

This module has all patches of torch and DeepSpeed for dry runs, each of which runs in a separate process. ``FakeWorld`` undoes
its patches when it exits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from deepspeed import DeepSpeedEngine, PipelineModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from dstrial.engine.deepspeed_internals import process
from dstrial.engine.deepspeed_internals.engines import load_config_file
from dstrial.engine.dryrun.tracker import Tracker
from dstrial.errors import TrialContractError

USER_CONSTANT = 1.0
"""Value that user code gets from ``.item()`` of a fake tensor."""

_TORCH, _DEEPSPEED = (
    str(pathlib.Path(str(module.__file__)).resolve().parent) + os.sep for module in (torch, deepspeed)
)
_TORCH_OPTIMIZERS = _TORCH + "optim" + os.sep
_OWN = str(pathlib.Path(__file__).resolve().parent) + os.sep
_COLLECTIVES = "c10d"
_META = "Meta"
_INITIALIZE = inspect.signature(deepspeed.initialize)


def _always(value: Any) -> Callable[..., Any]:
    def answer(*_args: object, **_kwargs: object) -> Any:
        return value

    return answer


class FakeWorld(contextlib.ExitStack):
    """Context manager that makes this process one rank of a virtual process group.

    Enter an instance only once.

    Args:
        tracker: records the tensor operations in ``running`` blocks.
        world_size: number of virtual ranks; collectives return at once, and leave their outputs unchanged.
        is_fake: whether the dry run uses fake tensors; if False, real ones.
        micro_batch_size: the engines' micro batch size per rank.
        rank: the virtual rank that this process represents.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        world_size: int = 1,
        is_fake: bool = True,
        micro_batch_size: int = 2,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.is_fake = is_fake
        self.micro_batch_size = micro_batch_size
        self._mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
        self._tracker = tracker
        self._size_and_rank = world_size, rank

    def __enter__(self) -> FakeWorld:
        super().__enter__()
        try:
            self._join_virtual_group(*self._size_and_rank)
            self._observe_phases()
            if self.is_fake:
                self._give_collectives_kernels()
                self._leave_out_compiled_code()
                self._convert_fake_modules()
                self._skip_argument_checks()
        except BaseException:
            self.close()
            raise
        return self

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record the tensor operations in the block; new tensors are fake if ``is_fake``."""
        with self._mode, self._tracker:
            yield

    @contextlib.contextmanager
    def building(self, on_engine: Callable[[Any], None], *, pipeline_refusal: str | None) -> Iterator[None]:
        """Make ``deepspeed.initialize`` build engines of ZeRO stage 0 in the block.

        If ``is_fake``, models that are built in the block have parameters without memory, and engines have fake parameters.
        ``on_engine(engine)`` is called with each new engine. If ``pipeline_refusal`` is not None, a pipeline raises
        ``TrialContractError`` with this message.
        """
        initialize = deepspeed.initialize

        def build(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
            arguments = dict(_INITIALIZE.bind(*args, **kwargs).arguments)
            if pipeline_refusal is not None and isinstance(arguments["model"], PipelineModule):
                raise TrialContractError(pipeline_refusal)
            given = [arguments.pop(name, None) for name in ("config", "config_params")]
            given.append(getattr(arguments.pop("args", None), "deepspeed_config", None))
            config: Any = next((one for one in given if one), {})
            if isinstance(config, str):
                config = load_config_file(config)
            arguments["config"] = self._stage_0_config(config, arguments["model"])
            if arguments.get("model_parameters") is not None:
                arguments["model_parameters"] = list(arguments["model_parameters"])
            with self.running():
                if self.is_fake:
                    _make_fake(arguments)
                found: tuple[Any, Any, Any, Any] = initialize(**arguments)
            on_engine(found[0])
            return found

        # PipelineModule and scripts need DeepSpeed's communication before there is an engine.
        deepspeed.init_distributed(auto_mpi_discovery=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(deepspeed, "initialize", build))
            if self.is_fake:
                stack.enter_context(shapes_only())
            yield

    def _stage_0_config(self, config: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Return a copy of ``config`` with ZeRO stage 0 and ``micro_batch_size``."""
        # A step has one micro batch, or one per stage in a pipeline.
        changed = copy.deepcopy({key: value for key, value in config.items() if key != "train_batch_size"})
        changed["train_micro_batch_size_per_gpu"] = self.micro_batch_size
        changed["gradient_accumulation_steps"] = model.num_stages if isinstance(model, PipelineModule) else 1
        changed["zero_optimization"] = {"stage": 0}
        changed.setdefault("steps_per_print", 1_000_000_000)
        return changed

    # ---- patches ---------------------------------------------------------------------------------

    def _replace(self, owner: Any, name: str, value: Any, **options: Any) -> None:
        self.enter_context(mock.patch.object(owner, name, value, **options))

    def _join_virtual_group(self, world_size: int, rank: int) -> None:
        size = str(world_size)
        # User code may require the address variables; nothing listens at this address.
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        counts = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
        variables = {"RANK": str(rank), "LOCAL_RANK": "0", **counts, **address}
        self.enter_context(mock.patch.dict(os.environ, variables))
        # DeepSpeed's shared-memory collectives for CPUs would wait for the missing ranks. The module is imported by name,
        # because the attribute ``deepspeed.comm.torch`` is the torch library.
        module, name = process.SHARED_MEMORY_OP
        self._replace(importlib.import_module(module), name, _always(None))
        # HashStore keeps its data in this process. ``vars``, because torch's type stubs do not declare it.
        store = vars(torch.distributed)["HashStore"]()
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        self.callback(torch.distributed.destroy_process_group)

    def _observe_phases(self) -> None:
        for name, phase in (*process.ENGINE_PHASES, ("allreduce_gradients", "reduce")):
            self._wrap(DeepSpeedEngine, name, functools.partial(_begin, self._tracker, phase))
        self._wrap(torch.Tensor, "backward", functools.partial(_begin, self._tracker, "backward"))

    def _wrap(
        self, owner: Any, name: str, around: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with around():
                return original(*args, **kwargs)

        self._replace(owner, name, wrapped)

    def _leave_out_compiled_code(self) -> None:
        """Replace DeepSpeed's compiled kernels, which allocate no memory, by no-ops."""
        self._replace(process.op_builder(), "load", _always(_NoKernels()))
        self.enter_context(mock.patch(".".join(process.FUSED_ADAM_KERNEL), _always(None), create=True))
        self.enter_context(without_compiler())

    def _convert_fake_modules(self) -> None:
        self._replace(nn.Module, "_apply", _apply_by_data)
        base: Any = torch.Tensor.data

        def assign(tensor: FakeTensor, value: torch.Tensor) -> None:
            base.__set__(tensor, value)
            if isinstance(value, FakeTensor):
                tensor.fake_device = value.fake_device

        self._replace(FakeTensor, "data", property(base.__get__, assign))

    def _skip_argument_checks(self) -> None:
        """Disable argument checks of ``torch.distributions``, which read tensor values."""
        set_checked = torch.distributions.Distribution.set_default_validate_args
        set_checked(False)
        self.callback(set_checked, __debug__)  # torch's default

    def _give_collectives_kernels(self) -> None:
        """Register no-op kernels for collectives that lack one for fake tensors.

        Torch 2.6 has no kernels for fake tensors, torch 2.13 has all. A no-op kernel returns its output tensors unchanged, and
        a finished ``Work``.
        The ``Work`` comes from a barrier of the fake default group, because in torch 2.6 Python cannot create one.

        Source: torch 2.6 csrc/distributed/c10d/Ops.cpp registers CPU, CUDA and other devices; schemas return outputs and work.
        """
        prefix = _COLLECTIVES + "::"
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        names = [
            name.removeprefix(prefix)
            for name in sorted(torch._C._dispatch_get_all_op_names())
            if name.startswith(prefix) and "." not in name and not has_kernel(name, _META)
        ]
        if not names:
            return
        group = torch.distributed.group.WORLD
        assert group is not None
        operations = getattr(torch.ops, _COLLECTIVES)
        work = operations.barrier(torch.empty(0), group.boxed(), [], -1)
        # Torch removes the kernels of a library that is no longer referenced.
        self._kernels = torch.library.Library(_COLLECTIVES, "IMPL")  # type: ignore[no-untyped-call]
        self.callback(vars(self).pop, "_kernels")
        for name in names:
            num_returns = len(getattr(operations, name).default._schema.returns)
            self._kernels.impl(name, _kernel(work, num_returns=num_returns), _META)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Make ``torch.compile`` a no-op in the block: compiling would change memory use."""

    def leave(model: Any = None, **_kwargs: object) -> Any:
        return model if model is not None else lambda later: later

    with mock.patch.object(torch, "compile", leave), mock.patch.object(nn.Module, "compile", _always(None)):
        yield


class _NoKernels:
    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_args, **_kwargs: 0


@contextlib.contextmanager
def _begin(tracker: Tracker, phase: str) -> Iterator[None]:
    tracker.enter_phase(phase)
    yield


def _kernel(work: Any, *, num_returns: int) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        return (None, work, (args[0], work))[num_returns]

    return kernel


def _apply_by_data(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """Replace ``nn.Module._apply``: convert a module's tensors by assigning ``data``."""
    # Torch's own version swaps tensor objects, and raises an error if other objects refer to these tensors.
    for one in module.modules() if recurse else [module]:
        for parameter in one._parameters.values():
            if parameter is None:
                continue
            with torch.no_grad():
                parameter.data = fn(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = fn(buffer)
    return module


class ScalarReads:
    """Chooses the value that ``.item()`` and similar reads of fake tensors return.

    User code gets ``USER_CONSTANT``, and ``bypasses`` records the line of user code. DeepSpeed gets 0, which means no overflow
    and a gradient norm of 0, so that DeepSpeed does not skip the step. Torch's optimizers get 1, the number of the first step.
    """

    def __init__(self) -> None:
        self.bypasses: dict[str, None] = {}  # places, in order

    def __call__(self, tensor: torch.Tensor) -> float | int | bool | complex:
        file, line = _reader()
        if file.startswith(_TORCH_OPTIMIZERS):
            value = 1.0
        elif file.startswith(_DEEPSPEED):
            value = 0.0
        else:
            value = USER_CONSTANT
            self.bypasses[f"{file}:{line}"] = None
        if tensor.dtype is torch.bool:
            return bool(value)
        if tensor.dtype.is_complex:
            return complex(value)
        return value if tensor.dtype.is_floating_point else int(value)


def _reader() -> tuple[str, int]:
    """Return file and line of the code that reads a tensor's value.

    This is the innermost frame outside of torch and this package. ``torch.optim`` counts as outside.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_OPTIMIZERS) or not file.startswith((_TORCH, _OWN)):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Build the modules in this block with meta parameters: shapes and dtypes only.

    A parameter's memory is freed as soon as the module registers the parameter, before any value is written.
    ``deepspeed.zero.Init``, with which Transformers builds models for ZeRO 3, is a no-op in the block.
    """
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            shape = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            shape.__dict__.update(parameter.__dict__)
            module._parameters[name] = shape

    convert: Callable[..., nn.Module] = nn.Module._apply

    def convert_shapes(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        def of_shape(tensor: torch.Tensor) -> Any:
            if not tensor.is_meta:
                return fn(tensor)
            # A meta tensor cannot move to a device; only its type can change.
            dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
            return torch.empty(tensor.shape, dtype=dtype, device="meta")

        return convert(module, of_shape, recurse)

    def unfilled(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        return tensor

    def not_divided(_init: Any, *_args: object, **_kwargs: object) -> None: ...

    fillers = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "register_parameter", register_shape))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", convert_shapes))
        for name in ("__init__", "__enter__", "__exit__"):
            stack.enter_context(mock.patch.object(deepspeed.zero.Init, name, not_divided))
        for name in fillers:
            stack.enter_context(mock.patch.object(nn.init, name, unfilled))
        yield


def _make_fake(arguments: dict[str, Any]) -> None:
    renewed = renew_parameters(arguments["model"])

    def replaced(parameters: Any) -> Any:
        return tree_map_only(nn.Parameter, lambda old: renewed.get(id(old), old), parameters)

    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = replaced(arguments["model_parameters"])
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = replaced(group["params"])


def renew_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Replace, in place, a model's parameters and buffers by uninitialized tensors.

    Inside ``FakeTensorMode`` the new tensors are fake. Tied parameters stay tied. Returns ``id(old parameter)`` -> new one.
    """
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in renewed:
                new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                renewed[id(old)] = new
            module._parameters[name] = renewed[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return renewed
