"""Import the modules that all dry runs need, before their processes are forked.

Fake tensors and checkpointed modules need torch's symbolic shapes and tracer, 800 modules; importing them starts no thread.
"""

import importlib

from dstrial.engine.dryrun.fake_world import without_compiler

with without_compiler():
    importlib.import_module("dstrial.engine.dryrun.measure")
for _name in ("torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
    importlib.import_module(_name)
