"""Allocations on other machines, over one connection each.

It is one by ssh or a step of Slurm.
"""
