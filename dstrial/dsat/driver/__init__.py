"""Runs a search: asks the method, starts trials, takes results, writes the record."""
