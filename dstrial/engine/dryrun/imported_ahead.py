"""Import, before a fork, the modules that all dry runs need.

Fake tensors and activation checkpointing need torch's symbolic shapes and tracer (800 modules). Their import starts no thread,
so that the process can still be forked.
"""

import importlib

from dstrial.engine.dryrun.fake_world import without_compiler

with without_compiler():
    importlib.import_module("dstrial.engine.dryrun.measure")
for _name in ("torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
    importlib.import_module(_name)
