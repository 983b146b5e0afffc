"""Runs allocations on other machines, over one connection to each.

It is one by ssh or a step of Slurm.
"""
