"""Detect stalled ranks, find the straggler, and restart the ranks if configured."""
