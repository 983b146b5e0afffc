"""Determined's Core API on a run directory, for training without a master."""
