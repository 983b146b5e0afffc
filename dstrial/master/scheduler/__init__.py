"""Makes rows true: assigns slots, runs processes, takes in output, deletes files."""

from dstrial.master.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
