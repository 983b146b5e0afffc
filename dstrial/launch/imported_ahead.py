"""Import the modules that all trials need: in each rank, or once in a fork server.

The imports must not run tensor operations, start threads, query devices or read rank variables: a fork would then differ from
a new process.
"""

# ruff: noqa: E402, F401  # the accelerator is chosen before DeepSpeed is imported, and nothing here is used

from dstrial.ranks.process_group import prepare_accelerator

prepare_accelerator()

import dstrial.launch.local_ranks
import dstrial.local.core_context
import dstrial.loop.loop
import dstrial.ranks.rendezvous_store
import dstrial.resume.apply
import dstrial.trainer
import dstrial.trial.context
from dstrial.engine.deepspeed_internals.process import import_modules_of_engines

import_modules_of_engines()
