"""What a fork server imports: what launchers and ranks do, sooner or later.

Nothing here runs a tensor operation, starts a thread or asks for a device: a fork would not be what a new process is.
"""

import dstrial.launch.agent
import dstrial.launch.rank_main
import dstrial.launch.slots
import dstrial.local.core_context
import dstrial.loop.loop
import dstrial.ranks.process_group
import dstrial.ranks.rendezvous_store
import dstrial.resume.apply
import dstrial.trainer
import dstrial.trial.context  # noqa: F401
from dstrial.engine.deepspeed_internals.process import import_modules_of_engines

import_modules_of_engines()
