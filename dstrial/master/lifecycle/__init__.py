"""What follows from events: transactions that change experiments and trials.

None of them starts, signals or deletes anything. What is to be done outside is written into rows, and the scheduler, which
is told by the topic "scheduler", does it.
"""
