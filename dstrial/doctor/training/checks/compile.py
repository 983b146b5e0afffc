"""``torch.compile`` of a small model in a trial keeps its losses, to 1e-5.

Inductor needs a C++ compiler on the CPU, and Triton with a C compiler and Python's headers on CUDA.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError

_BOUND = 1e-5
_COMPILERS = ("c++", "g++", "clang++", "gcc", "cc", "clang")


def run(bench: Bench) -> Finding:
    """Train with and without."""
    _require_compiler(bench)
    launched = bench.launch("compiled", env={"TORCHINDUCTOR_CACHE_DIR": str(bench.scratch / "inductor")})
    found = launched.facts
    difference = float(found["greatest_difference"])
    if not difference <= _BOUND:
        raise CheckFailedError(
            f"losses differ by {difference:.3g}; expected at most {_BOUND:g}",
            "Train without torch.compile here.",
            launched.end,
        )
    if not found["num_graphs"]:
        raise CheckFailedError("nothing was compiled", "See what torch printed, below.", launched.end)
    return Finding(
        f"{found['num_graphs']} graph(s) compiled in {found['compile_s']:.1f} s; losses equal to {difference:.1e}",
        "Triton's kernels" if bench.is_cpu else "",
    )


def _require_compiler(bench: Bench) -> None:
    if not any(map(shutil.which, _COMPILERS)):
        raise NotApplicableError(
            "there is no C++ compiler, which Inductor needs", "Install g++ to use torch.compile."
        )
    if bench.has_cuda:
        if importlib.util.find_spec("triton") is None:
            raise NotApplicableError(
                "Triton is missing, which Inductor needs on CUDA", "Install triton to use torch.compile."
            )
        headers = Path(sysconfig.get_path("include")) / "Python.h"
        if not headers.exists():
            raise NotApplicableError(
                f"{headers} is missing, which Triton compiles against",
                "Install Python's headers (python3-dev) to use torch.compile.",
            )
