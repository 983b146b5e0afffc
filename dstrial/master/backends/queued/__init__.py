"""Allocations in jobs of an engine that has a queue of its own, as Slurm."""
