"""Data of a search: candidates, outcomes of trials, and the journal on disk."""
