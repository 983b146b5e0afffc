"""Imports before a trial's own module: by each rank, or once by a fork server.

Nothing here runs a tensor operation, starts a thread or asks for a device, and nothing reads which rank a process is: a fork
would not be what a new process is.
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
