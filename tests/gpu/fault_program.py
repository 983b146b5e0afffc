"""Train six batches of ZeRO 1; ``kill:RANK`` or ``memory:RANK`` as argument ends that rank inside its fourth step."""

import os
import signal
import sys
import time

import torch
from text_runs import LossTrial, config, tell, train

kind, _, failing_rank = (sys.argv[1:] or [""])[0].partition(":")


class FaultTrial(LossTrial):
    """All-reduces on the ranks' device, gathers words over the control channel, and fails where it is asked to."""

    def __init__(self, context):
        super().__init__(context)
        mine = torch.full((1024,), context.distributed.get_rank() + 1.0, device=context.device)
        torch.distributed.all_reduce(mine)
        told = context.distributed.allgather(f"rank {context.distributed.get_rank()}")
        tell(all_reduce=float(mine.mean()), control_channel=told, device=str(context.device))
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
        # No machine has that much; torch's allocator refuses it at once, as it does when memory runs out.
        torch.empty(2**60, dtype=torch.uint8)


trial, _ = train({"deepspeed_config": config(1)}, 6, FaultTrial)
tell(losses=[float(loss) for loss in trial.losses])
