"""Train four batches with optimizer ``cpu_adam`` (with offload) or ``fused_adam``."""

import sys

from text_runs import config, print_facts, train

zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}} if sys.argv[1] == "cpu_adam" else {"stage": 0}
adam = {"type": "Adam", "params": {"lr": 1e-3}}
trial, _ = train({"deepspeed_config": config(0, zero_optimization=zero, optimizer=adam)}, 4)
used = trial.engine.optimizer
print_facts(
    optimizer=type(getattr(used, "optimizer", used)).__name__,
    losses=[float(loss) for loss in trial.losses],
)
