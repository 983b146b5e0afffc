"""State transitions of trials and experiments; functions run inside a transaction.

The functions change only database rows. The scheduler reads these rows, and starts and stops processes and deletes files.
"""
