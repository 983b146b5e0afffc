"""What dry runs import; imported once for all that are forked from one process.

DeepSpeed imports some modules only at their first use. Fake tensors and checkpointed modules need torch's symbolic shapes
and tracer, 800 modules; importing these starts no thread, and nothing is compiled.
"""

import importlib

from dstrial.engine.deepspeed_internals.process import LATE_MODULES
from dstrial.engine.dryrun.fake_world import without_compiler

with without_compiler():
    for _name in ("dstrial.engine.dryrun.measure", *LATE_MODULES):
        importlib.import_module(_name)
for _name in ("torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
    importlib.import_module(_name)
