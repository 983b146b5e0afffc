"""The search driver: asks the method, runs trials, records and reports results."""
