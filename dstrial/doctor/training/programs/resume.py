"""Train 12 batches at once, and as 7 and 5, in three configs and across stages."""

from __future__ import annotations

from typing import Any

import torch

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import train

_STOP, _END = 7, 12
_CONFIGURATIONS: tuple[tuple[int, int, str], ...] = (
    (0, 0, "fp32"),
    (2, 2, "bf16"),
    (3, 3, "fp32"),
    (1, 3, "fp32"),
)
"""ZeRO stage until the stop, stage after it, precision."""


def main() -> None:
    """Note how much the losses after the stop differ."""
    program = Program()
    program.keep_group()
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows: list[dict[str, Any]] = []
    for before, after, precision in _CONFIGURATIONS:
        name = f"{precision}, ZeRO {before}" + (f" -> {after}" if after != before else "")
        program.note(doing=name)
        row: dict[str, Any] = {"configuration": name, "across_stages": before != after}
        rows.append(row)
        try:
            row |= compared(before, after, precision)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
            program.note(runs=rows)
            if not program.may_go_on_after(error):
                raise
        program.note(runs=rows)
    program.note(doing="")


def compared(before: int, after: int, precision: str) -> dict[str, float]:
    """Return how far losses of whole and split training differ. Ranks: all."""
    whole, _ = train(_hparams(before, precision), _END)
    first, run_dir = train(_hparams(before, precision), _STOP)
    second, _ = train(_hparams(after, precision), _END, run_dir=run_dir)
    told = [float(loss) for loss in whole.losses]
    found = [float(loss) for loss in [*first.losses, *second.losses]]
    assert len(told) == len(found) == _END, (len(told), len(found))
    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(told, found, strict=True)]
    return {
        "greatest_difference": max(differences),
        "last_loss": told[-1],
        "last_loss_resumed": found[-1],
    }


def _hparams(stage: int, precision: str) -> dict[str, Any]:
    return {"deepspeed_config": deepspeed_config(stage, precision), "shape": {"dropout": 0.1}}


if __name__ == "__main__":
    main()
