"""Reconciles processes with rows: slots, processes, output, files."""
