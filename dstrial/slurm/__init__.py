"""Slurm: lists of nodes, allocations, jobs.

It is told not a word where its variables say enough.
"""
