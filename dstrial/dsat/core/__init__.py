"""Data types of a search: configurations, outcomes of trials, the journal on disk."""
