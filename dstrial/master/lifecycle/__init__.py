"""Transactions that follow from events.

They start, signal and delete nothing: what is to be done outside is written into rows for the scheduler.
"""
