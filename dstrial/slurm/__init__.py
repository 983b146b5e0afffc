"""Slurm, without a word to it where its variables say enough: lists of nodes, allocations, jobs."""
