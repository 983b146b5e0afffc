"""Determined's Core API on a run directory, with or without a master."""
