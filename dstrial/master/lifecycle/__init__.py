"""What follows from an event: functions of a transaction that change experiments, trials and allocations.

None of them starts, signals or deletes anything. What is to be done outside is written into rows, and the scheduler, which
is told by the topic "scheduler", does it.
"""
