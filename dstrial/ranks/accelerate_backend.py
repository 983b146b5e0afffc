"""Patch accelerate so that it recognises all ranks of a job on CPUs.

``PartialState._prepare_backend`` of accelerate 1.15 (``state.py``), which Hugging Face's Trainer also uses, chooses a backend
only for accelerators, or with ``cpu=True``, which disables DeepSpeed. Without a backend every rank behaves as a single-rank
job and trains on all data, even if a process group exists. Releases up to 1.10 chose gloo. The patch has the same effect as
``InitProcessGroupKwargs(backend="gloo")`` in a script; no environment variable selects the backend.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from dstrial import harness_paths

_MODULE = "accelerate.state"
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_MARK = "shows_cpu_ranks"  # attribute of the patched function


def show_ranks_to_accelerate() -> None:
    """Patch accelerate to use gloo on CPUs, now or when accelerate is imported.

    Idempotent. Ranks: any; no communication.
    """
    if _MODULE in sys.modules:
        _change(sys.modules[_MODULE])
    else:
        _change_at_import()


@functools.cache
def _change_at_import() -> None:
    harness_paths.install({_MODULE: _change})


def _change(module: Any) -> None:
    find_backend = module.PartialState._prepare_backend
    if hasattr(find_backend, _MARK):
        return

    @functools.wraps(find_backend)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        if cpu or backend is not None:
            return find_backend(self, cpu, sagemaker_dp, backend)
        kinds = module.DistributedType
        if _is_deepspeed_on_cpu():
            _bring_up_ranks()
            if self.device is None:
                self.device = _cpu()
            # PartialState then sets its distributed type from the same variable.
            return "gloo", kinds.NO
        found, kind = find_backend(self, cpu, sagemaker_dp, backend)
        if (found is None or kind is kinds.NO) and _has_ranks_on_gloo():
            found, kind = "gloo", kinds.MULTI_CPU
        if kind is kinds.MULTI_CPU and self.device is None:
            # accelerate would choose "cpu:0", which torch.load rejects, so that transformers 4.56 could not resume.
            self.device = _cpu()
        return found, kind

    setattr(prepare_backend, _MARK, True)
    module.PartialState._prepare_backend = prepare_backend


def _is_deepspeed_on_cpu() -> bool:
    from dstrial.ranks.process_group import has_accelerator

    is_wanted = os.environ.get(_USE_DEEPSPEED, "false").lower() == "true" and "LOCAL_RANK" in os.environ
    return is_wanted and not has_accelerator()


def _bring_up_ranks() -> None:
    """Create this job's gloo process group, or let DeepSpeed use the script's group.

    If the script has created a group, only DeepSpeed's communication is initialized, unless it already is.

    Ranks: all, collectively.
    """
    import deepspeed
    import torch.distributed

    from dstrial.ranks import process_group
    from dstrial.ranks.control_channel import timeout_from_environ
    from dstrial.ranks.identity import identify

    if not torch.distributed.is_initialized():
        process_group.init_process_group(identify(os.environ), timeout_s=timeout_from_environ())
        process_group.keep()
    elif not deepspeed.comm.is_initialized():
        with process_group.without_compiled_collectives(is_cpu=True):
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _has_ranks_on_gloo() -> bool:
    import torch.distributed

    return (
        torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
        and torch.distributed.get_backend() == "gloo"
    )


def _cpu() -> Any:
    import torch

    return torch.device("cpu")
