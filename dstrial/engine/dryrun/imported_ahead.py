"""Import the modules that all dry runs need, before their processes are forked.

DeepSpeed imports some modules only at their first use. Fake tensors and checkpointed modules need torch's symbolic shapes and
tracer, 800 modules. Importing these modules starts no thread and compiles nothing.
"""

import importlib

from dstrial.engine.deepspeed_internals.process import LATE_MODULES
from dstrial.engine.dryrun.fake_world import without_compiler

with without_compiler():
    for _name in ("dstrial.engine.dryrun.measure", *LATE_MODULES):
        importlib.import_module(_name)
for _name in ("torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
    importlib.import_module(_name)
