"""Imports torch, DeepSpeed and Determined for ``dstrial doctor`` and reports them.

It is a process of its own, because an import may hang or end the process. It writes one JSON object per line to its standard
output: ``{"begins": stage}``, then ``{"stage": stage, "seconds": …, "values": …}`` or ``{"stage": …, "error": …}``. What
libraries print goes to its standard error. At its deadline it writes the stack of every thread there and ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Run every stage; the first argument is the deadline, seconds."""
    # Linux's PR_SET_PDEATHSIG: a command that is killed leaves no import behind that hangs.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A watchdog in C: it fires though an import holds the interpreter's lock.
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    for stage, look in (("torch", _torch), ("deepspeed", _deepspeed), ("dstrial", _dstrial)):
        _write(out, {"begins": stage})
        began_at_s = time.monotonic()
        try:
            values = look()
        except BaseException as error:  # noqa: BLE001 - whatever an import raises is what was asked for
            # A name that a user's module shadows explains the rest, so the file is told too.
            _write(out, {"stage": stage, "error": _said(error), "seconds": time.monotonic() - began_at_s})
            if stage == "torch":
                break
        else:
            _write(out, {"stage": stage, "seconds": time.monotonic() - began_at_s, "values": values})
    # What libraries do when the interpreter ends is not asked for, and may take seconds.
    os._exit(0)


def _write(out: Any, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _torch() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed

        # The first question asks the driver; its warning says why there is no device.
        is_available = torch.cuda.is_available()
        num_devices = torch.cuda.device_count() if is_available else 0
    with_cuda = torch.version.cuda is not None or torch.version.hip is not None
    nccl = None
    if with_cuda and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call] # torch does not say
    return {
        "file": str(torch.__file__),
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "architectures": _architectures(torch) if with_cuda else [],
        "is_available": is_available,
        "num_devices": num_devices,
        "warnings": [" ".join(str(one.message).split()) for one in caught if "CUDA" in str(one.message)],
        "has_gloo": torch.distributed.is_gloo_available(),
        "num_threads": torch.get_num_threads(),
    }


def _architectures(torch: Any) -> list[str]:
    """What the build has kernels for; ``torch.cuda.get_arch_list`` needs a device."""
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return flags.split() if flags else []


def _deepspeed() -> dict[str, Any]:
    import deepspeed
    import torch.utils.cpp_extension
    from deepspeed.accelerator import get_accelerator

    from dstrial.engine.deepspeed_internals import process

    accelerator = get_accelerator()
    return {
        "file": str(deepspeed.__file__),
        "version": str(deepspeed.__version__),
        "accelerator": str(accelerator.device_name()),
        "backend": str(accelerator.communication_backend_name()),
        "cuda_home": torch.utils.cpp_extension.CUDA_HOME,
        "cuda_mismatch": None if torch.version.cuda is None else process.cuda_mismatch(),
        "operators": {
            name: _operator(torch, name, is_prebuilt=is_prebuilt, is_compatible=process.can_compile(builder))
            for name, builder, is_prebuilt in process.operators()
            if name != "deepspeed_not_implemented"  # what the CPU accelerator offers for all others
        },
    }


def _operator(torch: Any, name: str, *, is_prebuilt: bool, is_compatible: bool) -> dict[str, Any]:
    return {
        "is_prebuilt": is_prebuilt,
        "is_compiled": any(root.joinpath(name, f"{name}.so").exists() for root in _build_roots(torch)),
        "is_compatible": is_compatible,
    }


def _build_roots(torch: Any) -> list[Path]:
    """Where compiled operators lie.

    As torch 2.13 ``cpp_extension._get_build_directory``, which would make the directory.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return [Path(chosen)]
    root = Path(torch.utils.cpp_extension.get_default_build_root())
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    if torch.version.hip is not None:
        accelerator = "rocm" + torch.version.hip.replace(".", "")
    elif torch.version.cuda is not None:
        accelerator = "cu" + torch.version.cuda.replace(".", "")
    else:
        accelerator = "cpu"
    # Before torch 2.8 a ROCm build's folder was called as a CPU build's.
    return (
        [root / f"{python}_{accelerator}", root / f"{python}_cpu"]
        if torch.version.hip
        else [root / f"{python}_{accelerator}"]
    )


def _dstrial() -> dict[str, Any]:
    import determined

    import dstrial

    # Resolves what a trial imports, of Determined and of DeepSpeed.
    trial_class = dstrial.DeepSpeedTrial
    return {
        "file": str(dstrial.__file__),
        "version": str(dstrial.__version__),
        "determined": str(determined.__version__),
        "trial": trial_class.__name__,
    }
