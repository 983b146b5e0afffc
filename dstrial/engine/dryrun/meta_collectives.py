"""Collectives of fake tensors for a torch that has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

_NAMESPACE = "c10d"
_META = "Meta"


@contextlib.contextmanager
def meta_collectives() -> Iterator[None]:
    """Let collectives take fake tensors where torch has no kernels for them.

    Torch 2.6 has none, 2.13 has one for each. Such a kernel gives back what it was to fill, as it was, and a ``Work`` that has
    ended. Python cannot make one in torch 2.6: it is the answer of torch's ``fake`` process group, which must be the default one,
    to a collective of nothing.

    Ranks: this one; nothing is sent.
    Source: torch 2.6 csrc/distributed/c10d/Ops.cpp registers CPU, CUDA and other devices; schemas return what they fill, and
    the work.
    """
    names = [name for name in _collectives() if not _has_kernel(name)]
    if not names:
        yield
        return
    work = _ended_work()
    with torch.library._scoped_library(_NAMESPACE, "IMPL") as library:
        for name in names:
            library.impl(name, _kernel(work, num_returns=_num_returns(name)), _META)
        yield


def _collectives() -> list[str]:
    prefix = _NAMESPACE + "::"
    return sorted(
        name.removeprefix(prefix)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix) and "." not in name
    )


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{_NAMESPACE}::{name}", _META)


def _num_returns(name: str) -> int:
    return len(getattr(getattr(torch.ops, _NAMESPACE), name).default._schema.returns)


def _ended_work() -> Any:
    group = torch.distributed.group.WORLD
    assert group is not None  # the caller has made it
    barrier = getattr(torch.ops, _NAMESPACE).barrier
    return barrier(torch.empty(0), group.boxed(), [], -1)


def _kernel(work: Any, *, num_returns: int) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        return (None, work, (args[0], work))[num_returns]

    return kernel
