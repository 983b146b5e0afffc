"""Hostfiles, connections to hosts by ssh and srun, and checks before a start."""
