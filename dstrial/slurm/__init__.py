"""Slurm's allocations, jobs, batch scripts and commands."""
