"""Allocations on other machines, over one connection each, by ssh or a step of Slurm."""
