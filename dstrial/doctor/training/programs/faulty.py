"""Train six batches; a fault may end it inside the fourth."""

from __future__ import annotations

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import train


def main() -> None:
    """Train."""
    program = Program()
    trial, _ = train({"deepspeed_config": deepspeed_config(1)}, 6)
    program.note(last_loss=float(trial.losses[-1]))


if __name__ == "__main__":
    main()
