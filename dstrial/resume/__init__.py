"""Decide whether and how a run resumes: ``plan`` and ``batch`` are pure."""
