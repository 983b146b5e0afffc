"""Decide whether and how a run resumes from a checkpoint."""
