"""The search driver, which runs the trials that a search method requests."""
