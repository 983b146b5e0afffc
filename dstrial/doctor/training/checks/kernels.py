"""What is compiled at first use: DeepSpeed's operators and ``torch.compile``."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from concurrent import futures
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, LaunchResult, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError

_REASONS = (
    "CUDAMismatchException",
    "MissingCUDAException",
    "CUDA_HOME",
    "nvcc",
    "Ninja is required",
    "c++: not found",
)


def check_operators(bench: Bench) -> Finding:
    """FusedAdam (CUDA) and CPUAdam with ZeRO offload build and train, or say why not.

    They are built in a folder of this check's own, in which a killed build has left its lock: without care every later build
    waits there for ever. On the CPU only CPUAdam exists.
    """
    operators = ["cpu_adam"] + (["fused_adam"] if bench.has_cuda else [])
    with futures.ThreadPoolExecutor(len(operators)) as pool:
        began = {name: pool.submit(_build, bench, name) for name in operators}
        ended: dict[str, LaunchResult] = {name: future.result() for name, future in began.items()}
    rows: list[dict[str, Any]] = [
        {
            "operator": name,
            "result": "builds and trains"
            if launched.exit_code == 0
            else _reason(launched) or last_line(launched.output),
            "seconds": round(launched.seconds, 1),
        }
        for name, launched in ended.items()
    ]
    bench.note(operators=rows)
    broken = [name for name, launched in ended.items() if launched.exit_code != 0 and not _reason(launched)]
    if broken:
        raise CheckFailedError(
            f"{', '.join(broken)}: {last_line(ended[broken[0]].output)}",
            "Set torch_adam: true in the optimizer's params to train without it.",
            ended[broken[0]].end,
        )
    told = "; ".join(f"{row['operator']}: {row['result']} ({row['seconds']:.0f} s)" for row in rows)
    if all(launched.exit_code != 0 for launched in ended.values()):
        raise NotApplicableError(
            told, "Install what is missing, or set torch_adam: true in the optimizer's params."
        )
    missing = [row["operator"] for row in rows if row["result"] != "builds and trains"]
    not_shown = ["FusedAdam, a CUDA operator"] if not bench.has_cuda else []
    return Finding(told, "; ".join(not_shown + missing))


def _build(bench: Bench, operator: str) -> LaunchResult:
    folder = bench.scratch / f"extensions-{operator}"
    (folder / operator).mkdir(parents=True)
    (folder / operator / "lock").touch()
    env = {"TORCH_EXTENSIONS_DIR": str(folder), "MAX_JOBS": "4"}
    return bench.launch(
        "optimizer", "--operator", operator, env=env, facts_of=f"optimizer-{operator}", may_fail=True
    )


def _reason(launched: LaunchResult) -> str:
    """Return the line that says what is missing; empty for another kind of failure."""
    if launched.exit_code == 0:
        return ""
    return next(
        (
            line.strip()
            for line in reversed(launched.output.splitlines())
            if any(sign in line for sign in _REASONS)
        ),
        "",
    )


_LOSS_BOUND = 1e-5
_COMPILERS = ("c++", "g++", "clang++", "gcc", "cc", "clang")


def check_compile(bench: Bench) -> Finding:
    """``torch.compile`` of a small model in a trial keeps its losses, to 1e-5.

    Inductor needs a C++ compiler on the CPU, and Triton with a C compiler and Python's headers on CUDA.
    """
    _require_compiler(bench)
    launched = bench.launch("compiled", env={"TORCHINDUCTOR_CACHE_DIR": str(bench.scratch / "inductor")})
    found = launched.facts
    difference = float(found["greatest_difference"])
    if not difference <= _LOSS_BOUND:
        raise CheckFailedError(
            f"losses differ by {difference:.3g}; expected at most {_LOSS_BOUND:g}",
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
