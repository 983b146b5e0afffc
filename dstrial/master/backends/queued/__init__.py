"""Run allocations in jobs of an engine that has a queue: Slurm or Ray."""
