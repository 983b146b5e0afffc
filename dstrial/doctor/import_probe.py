"""Import torch, DeepSpeed and dstrial for ``dstrial doctor``; report versions.

``main`` runs in a separate process, because an import may hang or crash. For each import (stage) the process writes JSON lines to
standard output: ``{"begins": stage}``, then ``{"stage": stage, "seconds": …, "values": …}`` or ``{"stage": …, "error": …}``.
Libraries' output goes to standard error. At the deadline the process dumps all threads' stacks to standard error and exits.
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
from typing import Any


def main() -> None:
    # Linux's PR_SET_PDEATHSIG: if the command is killed, a hanging import is killed too.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A watchdog in C, which fires even if an import holds the GIL.
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    for stage, probe in (("torch", _torch), ("deepspeed", _deepspeed), ("dstrial", _dstrial)):
        _write(out, {"begins": stage})
        began_at_s = time.monotonic()
        try:
            found: dict[str, Any] = {"values": probe()}
        except BaseException as error:  # noqa: BLE001 - any exception of an import is the result
            text = " ".join(str(error).split())
            found = {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__}
        _write(out, {"stage": stage, "seconds": time.monotonic() - began_at_s, **found})
        if stage == "torch" and "error" in found:
            break
    # Skip the libraries' exit handlers, which may take seconds.
    os._exit(0)


def _write(out: Any, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def _torch() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        # The first call initialises the driver; its warning says why there is no device.
        is_available = torch.cuda.is_available()
        if is_available:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # warns of devices without kernels
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "num_devices": torch.cuda.device_count() if is_available else 0,
        "warnings": [" ".join(str(one.message).split()) for one in caught if "CUDA" in str(one.message)],
    }


def _deepspeed() -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from dstrial.engine.deepspeed_internals import process

    return {
        "version": str(deepspeed.__version__),
        "accelerator": str(get_accelerator().device_name()),
        "cuda_mismatch": None if torch.version.cuda is None else process.cuda_mismatch(),
    }


def _dstrial() -> dict[str, Any]:
    import dstrial

    # Imports the modules of Determined and DeepSpeed that a trial uses.
    dstrial.DeepSpeedTrial  # noqa: B018
    return {}
