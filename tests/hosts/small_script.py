"""A user script that trains ``SmallTrial`` and resumes its run if there is one."""

from __future__ import annotations

import os
import sys

from small_trial import SmallTrial

import dstrial

CONFIG = {"name": "script", "searcher": {"name": "single", "metric": "zero"}}

if __name__ == "__main__":
    run_dir, num_batches, zero_stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hparams = {
        "zero_stage": zero_stage,
        "pause_s": float(os.environ.get("PAUSE_S", "0")),
        "micro_batch_size": int(os.environ.get("MICRO", "6")),
    }
    with dstrial.init(hparams=hparams, exp_conf=CONFIG, run_dir=run_dir) as context:
        ranks = context.distributed
        local, node = f"{ranks.local_rank}/{ranks.local_size}", f"{ranks.cross_rank}/{ranks.cross_size}"
        print(
            f"rank {ranks.rank}/{ranks.size} local {local} node {node} on {os.uname().nodename}", flush=True
        )
        dstrial.Trainer(SmallTrial(context), context).fit(
            max_length=dstrial.Batch(num_batches),
            checkpoint_period=dstrial.Batch(10),
            reporting_period=dstrial.Batch(5),
            latest_checkpoint="latest",
        )
