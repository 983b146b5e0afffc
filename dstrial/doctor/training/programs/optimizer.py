"""Train with one of DeepSpeed's compiled optimizers."""

from __future__ import annotations

import math
from typing import Any

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import train


def main() -> None:
    """Train four batches."""
    program = Program("operator")
    operator = str(program.arguments.operator)
    program.note(doing=f"building {operator}")
    zero: dict[str, Any] = {"stage": 0}
    if operator == "cpu_adam":
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = deepspeed_config(0, zero_optimization=zero, optimizer={"type": "Adam", "params": {"lr": 1e-3}})
    trial, _ = train({"deepspeed_config": config}, 4)
    losses = [float(loss) for loss in trial.losses]
    used = type(getattr(trial.engine.optimizer, "optimizer", trial.engine.optimizer)).__name__
    program.note(doing="", **{f"{operator}_optimizer": used, f"{operator}_losses": losses})
    assert all(map(math.isfinite, losses)), losses
    assert used == {"cpu_adam": "DeepSpeedCPUAdam", "fused_adam": "FusedAdam"}[operator], used


if __name__ == "__main__":
    main()
