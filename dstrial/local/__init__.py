"""Determined's Core API, implemented on a run directory, with or without a master."""
