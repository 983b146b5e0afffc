"""Train six batches with ZeRO 1; optionally fail a rank in its 4th forward pass.

Argument: ``kill:RANK`` (SIGKILL) or ``memory:RANK`` (out of memory).
"""

import os
import signal
import sys
import time

import torch
from text_runs import LossTrial, config, print_facts, train

kind, _, failing_rank = (sys.argv[1:] or [""])[0].partition(":")


class FaultTrial(LossTrial):
    """Tests an all-reduce and the control channel, then fails as the argument says."""

    def __init__(self, context):
        super().__init__(context)
        mine = torch.full((1024,), context.distributed.get_rank() + 1.0, device=context.device)
        torch.distributed.all_reduce(mine)
        told = context.distributed.allgather(f"rank {context.distributed.get_rank()}")
        print_facts(all_reduce=float(mine.mean()), control_channel=told, device=str(context.device))
        self.engine.module.register_forward_hook(self.fail_if_asked)
        self.num_forwards = 0

    def fail_if_asked(self, *_):
        self.num_forwards += 1
        if self.num_forwards != 4 or str(self.context.distributed.get_rank()) != failing_rank:
            return
        print(f"fails at {time.time()}", flush=True)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        held = []
        while self.context.device.type != "cpu":
            held.append(torch.empty(2**30, dtype=torch.uint8, device=self.context.device))
        # 1 EiB: torch's CPU allocator fails at once, with the error of exhausted memory.
        torch.empty(2**60, dtype=torch.uint8)


trial, _ = train({"deepspeed_config": config(1)}, 6, FaultTrial)
print_facts(losses=[float(loss) for loss in trial.losses])
