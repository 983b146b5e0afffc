"""What dry runs import; imported once for all that are forked from one process.

The compiler has threads, which would not be forked; DeepSpeed imports some of its modules only when it is used.
"""

import importlib

from dstrial.engine.deepspeed_internals.process import LATE_MODULES
from dstrial.engine.dryrun.patches import without_compiler

with without_compiler():
    for _name in ("dstrial.engine.dryrun.measure", *LATE_MODULES):
        importlib.import_module(_name)
