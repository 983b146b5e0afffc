"""Hosts: hostfiles, connections by ssh and srun, and checks before a start."""
