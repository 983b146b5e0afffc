"""A Core API script with DeepSpeed, which ``test_reporting_context`` runs."""

from __future__ import annotations

import json
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any


def train(directory: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train once per case; return each loop's step count and how the loop ended."""
    from dstrial.ranks import process_group
    from dstrial.ranks.identity import identify

    process_group.init_process_group(identify(os.environ), timeout_s=60)
    warnings.simplefilter("ignore", FutureWarning)
    results = {
        case: (_fit if case == "fit" else _train)(pathlib.Path(directory) / f"{case}.json", case)
        for case in cases
    }
    process_group.shutdown()
    return results


def _train(result_path: pathlib.Path, case: str) -> dict[str, Any]:
    import deepspeed
    import torch
    from determined import core

    from dstrial import dsat

    os.environ["DSTRIAL_DSAT_HPARAMS"] = json.dumps(
        {
            "_use_dsat_mode": case != "off",
            "_dsat": {"max_s": 60.0 if case == "short" else 3.0, "window_s": 0.02},
        }
    )
    os.environ["DSTRIAL_DSAT_RESULT"] = str(result_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 1_000_000,
            "allgather_bucket_size": 1_000_000,
        },
    }
    before = deepspeed.DeepSpeedEngine.step
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    num_micro_steps = {"off": 4, "short": 12}.get(case, 4000)
    left = "by its end"
    is_chief = torch.distributed.get_rank() == 0
    # In the dummy core context every rank is chief; this operation's chief is rank 0.
    op = core.DummySearcherOperation(num_micro_steps, is_chief)

    def step(micro_step: int) -> None:
        loss = engine(torch.randn(4, 32)).square().mean()
        if case == "nan" and micro_step > 10:
            loss = loss * float("nan")
        if case == "error" and micro_step > 10:
            raise KeyError("mine")
        if case == "memory" and micro_step > 10:
            torch.empty(2**50)
        engine.backward(loss)
        engine.step()

    try:
        with core.init() as core_context:
            if case.startswith("each"):  # as Determined's example of the Core API does
                for micro_step in range(num_micro_steps):
                    with dsat.dsat_reporting_context(core_context, op):
                        step(micro_step)
                if is_chief:
                    op.report_completed(1.0)
            else:
                with dsat.dsat_reporting_context(core_context, op):
                    for micro_step in range(num_micro_steps):
                        step(micro_step)
    except SystemExit as exit_:
        left = f"by exit {exit_.code}"
    except (KeyError, ArithmeticError, RuntimeError) as error:
        left = type(error).__name__
    return {
        "left": left,
        "steps": int(engine.global_steps),
        "is_restored": deepspeed.DeepSpeedEngine.step is before,
        "is_completed": op._completed,
    }


def _fit(result_path: pathlib.Path, _case: str) -> dict[str, Any]:
    """Call ``Trainer.fit`` as a script without any dsat code does."""
    import sys

    import deepspeed
    from determined import pytorch

    import dstrial

    sys.path.insert(0, str(pathlib.Path(__file__).parent / "worked"))
    from worked_trials import WorkedTrial

    hparams = {
        "fault": "",
        "deepspeed_config": {
            "train_batch_size": 8,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        },
        "overwrite_deepspeed_args": {},
        "_use_dsat_mode": True,
        "_dsat": {"max_s": 0.3, "window_s": 0.02},
        "_around_fit": "dstrial.dsat.rank.context:around_fit",
    }
    os.environ["DSTRIAL_DSAT_HPARAMS"] = json.dumps(hparams)
    os.environ["DSTRIAL_DSAT_RESULT"] = str(result_path)
    os.environ["DSTRIAL_RUNS_DIR"] = str(result_path.parent / "runs")
    before = deepspeed.DeepSpeedEngine.step
    left = "by its end"
    with dstrial.init() as context:
        trainer = dstrial.Trainer(WorkedTrial(context), context)
        try:
            trainer.fit(max_length=pytorch.Batch(100_000), checkpoint_policy="none")
        except SystemExit as exit_:
            left = f"by exit {exit_.code}"
        return {
            "left": left,
            "steps": int(context.models[0].global_steps),
            "is_restored": deepspeed.DeepSpeedEngine.step is before,
        }
