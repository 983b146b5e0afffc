"""Engines as checkpoints have them, read without running what a pickle names."""
