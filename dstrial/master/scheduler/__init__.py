"""Reconciles processes with rows: assigns slots, runs processes, takes in output, deletes files."""
