"""Train five batches with and without ``torch.compile``."""

import torch
from text_runs import LossTrial, config, keep_group, print_facts, train
from torch._dynamo.utils import counters


class CompiledTrial(LossTrial):
    def __init__(self, context):
        super().__init__(context)
        self.model.compile()


keep_group()
torch.backends.cuda.matmul.allow_tf32 = False
hparams = {"deepspeed_config": config(0), "shape": {"width": 32, "num_layers": 1}}
losses = [[float(loss) for loss in train(hparams, 5, kind)[0].losses] for kind in (LossTrial, CompiledTrial)]
print_facts(losses=losses, num_graphs=int(counters["stats"]["unique_graphs"]))
