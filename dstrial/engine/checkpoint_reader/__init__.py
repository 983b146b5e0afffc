"""Engines as checkpoints have them, read without running what a pickle names.

Nothing here communicates: any rank may call it, and any process that has no ranks.
"""
