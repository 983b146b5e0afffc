"""Makes true what the rows say: gives slots, starts and ends processes, takes in their output, deletes files."""

from dstrial.master.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
