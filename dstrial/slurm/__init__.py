"""Slurm's node lists, allocations and jobs; variables come before commands."""
