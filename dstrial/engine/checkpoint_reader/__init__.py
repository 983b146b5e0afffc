"""Engines as checkpoints have them, read without ranks and without running what a pickle names."""
