"""A user's Trainer API script whose ranks are defined by the environment.

``train_script.py [--times N] [--batches N]``; with ``--times 2`` it trains twice in the same process, like a
notebook cell that is run again.
"""

import argparse
import dataclasses
import json
import logging
import os
import pathlib

import determined as det
from small_trials import DataParallelTrial

import dstrial
from dstrial.ranks.identity import identify

HYPERPARAMETERS = {
    "deepspeed_config": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    },
    "num_records": 70,
}
EXPERIMENT = {
    "name": "script",
    "searcher": {"name": "single", "metric": "validation_loss"},
    "reproducibility": {"experiment_seed": 3},
}


def train(batches):
    info = det.get_cluster_info()
    latest_checkpoint = info.latest_checkpoint if info is not None else None
    hyperparameters = HYPERPARAMETERS if info is None else None
    identity = identify(os.environ)
    with dstrial.init(hparams=hyperparameters, exp_conf=EXPERIMENT) as context:
        if "WHO_DIR" in os.environ:
            total = sum(context.distributed.allgather(identity.rank + 1))
            told = dataclasses.asdict(identity) | {"total": total}
            pathlib.Path(os.environ["WHO_DIR"], f"{identity.rank}.json").write_text(json.dumps(told))
        trainer = dstrial.Trainer(DataParallelTrial(context), context)
        return trainer.fit(
            max_length=dstrial.Batch(batches),
            reporting_period=dstrial.Batch(4),
            validation_period=dstrial.Batch(6),
            checkpoint_policy="none",
            latest_checkpoint=latest_checkpoint,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--batches", type=int, default=12)
    # DeepSpeed's launcher adds --local_rank, whose value is in the environment as well.
    options, _ = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO)
    for _ in range(options.times):
        result = train(options.batches)
        print(f"trained {result.batches_trained} of {result.batches_total} batches")


if __name__ == "__main__":
    main()
