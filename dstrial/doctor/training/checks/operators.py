"""FusedAdam (CUDA) and CPUAdam with ZeRO offload build and train, or say why not.

They are built in a folder of this check's own, in which a killed build has left its lock: without care every later build
waits there for ever. On the CPU only CPUAdam exists.
"""

from __future__ import annotations

from concurrent import futures
from typing import Any

from dstrial.doctor.training.bench import Bench, Launched, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError

_REASONS = (
    "CUDAMismatchException",
    "MissingCUDAException",
    "CUDA_HOME",
    "nvcc",
    "Ninja is required",
    "c++: not found",
)


def run(bench: Bench) -> Finding:
    """Build and train with each, at the same time."""
    operators = ["cpu_adam"] + (["fused_adam"] if bench.has_cuda else [])
    with futures.ThreadPoolExecutor(len(operators)) as pool:
        began = {name: pool.submit(_build, bench, name) for name in operators}
        ended: dict[str, Launched] = {name: future.result() for name, future in began.items()}
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


def _build(bench: Bench, operator: str) -> Launched:
    folder = bench.scratch / f"extensions-{operator}"
    (folder / operator).mkdir(parents=True)
    (folder / operator / "lock").touch()
    env = {"TORCH_EXTENSIONS_DIR": str(folder), "MAX_JOBS": "4"}
    return bench.launch(
        "optimizer", "--operator", operator, env=env, facts_of=f"optimizer-{operator}", may_fail=True
    )


def _reason(launched: Launched) -> str:
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
