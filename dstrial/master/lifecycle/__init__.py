"""State transitions: each function runs in the transaction of an event.

They have no side effects outside the database; processes and files are left to the scheduler, through rows.
"""
