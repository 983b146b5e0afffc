"""Determined's Core API on a run directory, for training off any cluster.

``run_directory`` names the files; ``context.init`` puts a core context together.
"""
