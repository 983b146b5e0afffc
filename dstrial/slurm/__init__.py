"""Run Slurm's commands, write batch scripts, and parse jobs and allocations."""
