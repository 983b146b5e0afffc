"""Let Accelerate see all ranks where DeepSpeed trains on the CPU.

``PartialState`` of accelerate 1.15 (``state.py``, ``_prepare_backend``) finds a backend for accelerators only, unless it is told
``cpu=True``, and then it turns DeepSpeed off. With DeepSpeed on CPU ranks it is left without a backend, and every rank takes
itself for the only one of the job and trains on all the data. A script may pass
``InitProcessGroupKwargs(backend="gloo")``; here the same is done for scripts that do not know of it, the Hugging Face Trainer
among them, when (and only if) ``accelerate`` is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


def watch_for_accelerate() -> None:
    """Have ``accelerate.state`` changed right after it is imported, if it ever is. Ranks: each its own; no communication."""
    if _MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def see_all_ranks(module: Any) -> None:
    """Make ``PartialState`` of Accelerate use gloo where DeepSpeed is asked for and there is no accelerator.

    The process group is then the one that dstrial makes, which does not compile DeepSpeed's operators for the CPU.

    Args:
        module: ``accelerate.state``.
    """
    find_backend = module.PartialState._prepare_backend

    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        is_wanted = os.environ.get(_USE_DEEPSPEED, "false").lower() == "true" and "LOCAL_RANK" in os.environ
        if cpu or backend is not None or not is_wanted:
            return find_backend(self, cpu, sagemaker_dp, backend)
        from dstrial.ranks import process_group
        from dstrial.ranks.control import timeout_from_environ
        from dstrial.ranks.identity import identify

        if process_group.has_accelerator():
            return find_backend(self, cpu, sagemaker_dp, backend)
        process_group.init_process_group(identify(os.environ), timeout_s=timeout_from_environ())
        process_group.keep()
        return find_backend(self, cpu, sagemaker_dp, "gloo")

    module.PartialState._prepare_backend = prepare_backend


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``accelerate.state`` as usual and changes it right after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        see_all_ranks(module)
